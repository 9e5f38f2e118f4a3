//go:build outlive

package cmd_test

import (
	"fmt"
	"os"
	"testing"
)

// agedEnv names a store in which TestJobsOutliveKilledOwner runs, instead of a new one.
// `ckptstore bench age --keep` makes old stores.
const agedEnv = "CKPTSTORE_TEST_AGED"

// TestJobsOutliveKilledOwner: the process that owns the store is killed, and one of the
// jobs takes over. No job ends, no step or save is lost, and no run can be run twice.
func TestJobsOutliveKilledOwner(t *testing.T) {
	t.Parallel()
	o := outlive(t)
	if aged := os.Getenv(agedEnv); aged != "" {
		o.dir = aged
	}
	owner := o.serve()
	for i := range 3 {
		o.start(fmt.Sprintf("outliving-%d-%d", os.Getpid(), i))
	}
	o.commits(2)
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	o.second()
	o.commits(2)
	o.end()
}
