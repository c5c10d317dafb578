"""The demo fleet: three tiny models that really answer, trained on text made here."""
