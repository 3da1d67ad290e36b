"""What a group keeps in its workers, the driver's half: its books (`residents`), and what users hold (`handles`)."""
