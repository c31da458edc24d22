"""Settings of the site that the browser looks at: as the tests', under the strictest policy, and quick to follow."""

from tests.browser.policy import queue_settings
from tests.settings import *  # noqa: F403 -- the same, and a little more
from tests.settings import INSTALLED_APPS, MIDDLEWARE

INSTALLED_APPS = [*(app for app in INSTALLED_APPS if app != "tests.testapp"), "tests.browser"]
MIDDLEWARE = ["tests.browser.policy.csp", *MIDDLEWARE]
ALLOWED_HOSTS = ["127.0.0.1"]
DBTASKQUEUE = queue_settings()
