package store

import (
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/internal/archive"
)

// envCut is the number of events at which the live stream is cut, for tests that
// want many cuts of a short log. It is no setting: a stream that is cut often makes
// its clients wait often.
const envCut = "CKPTSTORE_TEST_CUT_EVENTS"

// cuttingByEnv is c, or what envCut asks for.
func cuttingByEnv(c cutting) (cutting, error) {
	text := os.Getenv(envCut)
	if text == "" {
		return c, nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n < 16 {
		return c, fmt.Errorf("open store: %s=%q: want a number of events, 16 or more", envCut, text)
	}
	c.events, c.every = n, 200*time.Millisecond
	c.limits = archive.Limits{Messages: int(n / 8), Bytes: c.limits.Bytes}
	return c, nil
}
