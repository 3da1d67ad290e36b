"""Running a job."""
