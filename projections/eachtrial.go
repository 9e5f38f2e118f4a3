package projections

// EachTrial calls visit for the trials of all runs, with what their rows hold: what
// follows from reports is left out, which takes longer than all the rest.
func EachTrial(r Reader, visit func(Trial) error) error { return each(r, key(keyTrial), visit) }
