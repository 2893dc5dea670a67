"""The fifth-generation tensor core (PTX ISA 9.7.16), a file a topic."""
