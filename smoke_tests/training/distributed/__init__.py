"""Training in several processes: what starts and watches them, and the programs that they run."""
