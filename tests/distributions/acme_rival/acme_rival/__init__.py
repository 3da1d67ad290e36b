"""Never imported: two distributions with one name are refused by their metadata."""

raise AssertionError("the plugin of a claimed name was imported")
