"""How blocks of taps get from the rank that makes them to the rank that hosts the draft."""
