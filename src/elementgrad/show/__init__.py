"""The verb show: pictures and reports. Nothing else in the library imports it."""
