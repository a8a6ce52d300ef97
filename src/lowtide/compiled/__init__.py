"""The recorder's hot path in C++; see `recorder.h`. Never needed, only faster."""
