"""The papers' experiments in virtual time: what they found against what is found here."""
