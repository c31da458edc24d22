"""The project that the README's four steps are added to."""

import os
import sys

from django.core.management import execute_from_command_line

os.environ["DJANGO_SETTINGS_MODULE"] = "mysite.settings"
execute_from_command_line(sys.argv)
