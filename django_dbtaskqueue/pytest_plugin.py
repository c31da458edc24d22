"""The pytest plugin beside pytest-django: fixtures of the test kit, for projects that use the package."""
