"""What is kept: the database, the winners, the shipped layer, the artifacts.

Import from the modules. `winners` and `shipped` need only the standard library,
for the lookups that have milliseconds; `database` needs sqlite-utils, which
takes 150 ms to import (2026-11-29), so nothing on those paths may import it.
"""
