"""The recorder's hot path in C++; see `recorder.h`. Optional: it only makes lowtide faster."""
