package data

import (
	"os"
	"runtime"
)

// waiting is how many threads may wait for a disk while others compute: those
// of two ranks that write past the page cache.
const waiting = 4

// Threads lets Go run as many threads as there are cores while others wait for
// the disk: a write past the page cache holds its thread for milliseconds, and
// the runtime takes a while to notice. A command that saves or loads calls it
// once. $GOMAXPROCS, which a user has set, stays.
func Threads() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + waiting)
	}
}
