package launch

import "fmt"

// crashLoop notices attempts that fail alike, one after the other, after they
// resumed from the same checkpoint, without a commit in between. Another one
// will most likely do the same.
type crashLoop struct {
	resume string
	cause  string
	rank   int
	first  int // attempt; 0: none has failed
}

// failed takes note of the end of an attempt that resumed from a checkpoint;
// stands means that none was committed since. It returns what is to be said of
// it, or "".
func (c *crashLoop) failed(attempt int, resume string, stands bool, cause *FailedError, run string) string {
	alike := c.first > 0 && c.resume == resume && c.cause == cause.Cause && c.rank == cause.Rank
	if !stands {
		*c = crashLoop{} // it has got somewhere
		return ""
	}
	if !alike {
		*c = crashLoop{resume, cause.Cause, cause.Rank, attempt}
		return ""
	}
	which := fmt.Sprintf("attempts %d and %d", c.first, attempt)
	if attempt > c.first+1 {
		which = fmt.Sprintf("attempts %d to %d", c.first, attempt)
	}
	if resume == "" {
		return which + " failed alike, each from the beginning: the program or its configuration may be bad"
	}
	return fmt.Sprintf("%s failed alike after resuming from %s: the checkpoint or the code may be bad; `ckptstore ls %s` lists earlier ones, resume from one with --resume %s@NAME", which, resume, run, run)
}
