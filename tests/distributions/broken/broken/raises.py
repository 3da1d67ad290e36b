raise RuntimeError("the licence file is missing")
