raise SystemExit("the licence file is missing")
