package insight

import (
	"fmt"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// Kinds of a [Risk].
const (
	RiskNoCommit = "no_commit" // a run trains, and its last commit is long ago
	RiskDisk     = "disk"      // the disk of the checkpoints is nearly full
)

// Risk is something that may cost work soon.
type Risk struct {
	Kind    string    `json:"kind"`
	Run     string    `json:"run,omitempty"`
	Text    string    `json:"text"`                    // a sentence with the figures
	Since   time.Time `json:"since,omitzero"`          // of the last commit or, before the first, of the job's start
	Seconds float64   `json:"seconds,omitempty"`       // since then
	Usual   float64   `json:"usual_seconds,omitempty"` // the usual time between two commits
	Free    uint64    `json:"free_bytes,omitempty"`
	Size    uint64    `json:"size_bytes,omitempty"`
	Command string    `json:"command"` // shows more
}

// lateIntervals is after how many usual intervals a commit is missing.
const lateIntervals = 3

// NoCommit reports the risk of a run that trains since started and whose last commit is more
// than three usual intervals ago: see [Interval]. A run without a usual interval has no risk.
func NoCommit(t projections.Tally, started, now time.Time) (Risk, bool) {
	usual, since := Interval(t), t.LastCommitAt
	if started.After(since) {
		since = started
	}
	age := now.Sub(since)
	if usual == 0 || age <= lateIntervals*usual {
		return Risk{}, false
	}
	return Risk{
		Kind: RiskNoCommit, Run: t.Run, Since: since, Seconds: age.Seconds(), Usual: usual.Seconds(),
		Text:    fmt.Sprintf("no commit of %s for %v, usually one every %v", t.Run, age.Round(time.Second), usual.Round(100*time.Millisecond)),
		Command: "ckptstore ls --all -- " + shellWord(t.Run),
	}, true
}

// shellWord quotes a name for a POSIX shell, unless it has only characters that need no quotes.
func shellWord(name string) string {
	if name != "" && strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.@/") == "" {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}

const (
	// tightPart of a disk must stay free.
	tightPart = 0.05
	// tightSaves is for how many of the largest saves there must be room.
	tightSaves = 3
)

// TightDisk reports the risk of a disk with less than a twentieth free, or without room for
// three saves of the given size in bytes.
func TightDisk(free, size, save uint64) (Risk, bool) {
	if size == 0 || float64(free) >= tightPart*float64(size) && free >= tightSaves*save {
		return Risk{}, false
	}
	return Risk{
		Kind: RiskDisk, Free: free, Size: size,
		Text:    fmt.Sprintf("the disk of the checkpoints has %.1f %% free", 100*float64(free)/float64(size)),
		Command: "ckptstore gc --help",
	}, true
}
