"""The order of calls, holds, deadlines and residents, in the driver."""
