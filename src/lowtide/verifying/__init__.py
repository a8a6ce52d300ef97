"""Running a step with and without lowtide, from one state, and comparing what it leaves behind."""
