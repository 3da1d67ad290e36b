"""An executor as a third party would write it."""
