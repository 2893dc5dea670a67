"""tunekit: declarative CuTeDSL kernel specs, tuned in isolation, served by shape."""
