//go:build testbed

package nodes

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

// EnvClockRate has the rate of this node's clock in the programs of a testbed: 0.9 for a
// clock that runs 10 % slow.
const EnvClockRate = "CKPTSTORE_TESTBED_CLOCK_RATE"

// skewed returns the time after which this node's clock has counted d.
//
// The nodes of a testbed have one clock in common, and a time namespace only shifts it. So
// the timeouts are scaled in place of the clock. Both are the same for every deadline
// between nodes. Each compares a time that this process has measured with T, or a fraction
// of T. A clock of the rate r measures r·t when t has passed, and so reaches d when d/r has
// passed. That is when a right clock reaches d/r. T comes into a process in two places:
// [Listen] has it from its caller, and a [Link] from the coordinator's answer. Both pass it
// through this function, and all that follows is computed from the result: beats, ticks,
// suspicion, loss, the silence after which a node kills its workers, and the deadline of the
// guard, which the trainer gives it as the time that is left.
//
// Durations that are not fractions of T, such as the limits of requests, are not scaled.
// None of them determines when workers are killed or a node is lost.
func skewed(d time.Duration) time.Duration {
	text := os.Getenv(EnvClockRate)
	if text == "" {
		return d
	}
	rate, err := strconv.ParseFloat(text, 64)
	if err != nil || rate <= 0 {
		panic(fmt.Sprintf("%s=%s: want a positive number", EnvClockRate, text))
	}
	return time.Duration(float64(d) / rate)
}
