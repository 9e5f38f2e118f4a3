package trainer

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/console"
)

// Every flag in the help is registered. Otherwise only its first user would
// notice.
func TestFlagsOfTheHelp(t *testing.T) {
	c := runCommand(console.Streams{}, nil, Parts{})
	named := regexp.MustCompile(`--([a-z][a-z-]+)`).FindAllStringSubmatch(c.Long, -1)
	if len(named) == 0 {
		t.Fatal("the help names no flag")
	}
	others := []string{"rdzv", "lr"} // several, and one of a script
	for _, flag := range named {
		if c.Flags().Lookup(flag[1]) == nil && !slices.Contains(others, flag[1]) {
			t.Errorf("the help speaks of --%s, which is no flag", flag[1])
		}
	}
	for _, short := range []string{"r", "t", "m", "q"} {
		if c.Flags().ShorthandLookup(short) == nil {
			t.Errorf("there is no -%s", short)
		}
	}
}

// An attribute may have any name and value, also those of the log's own.
func TestAttributesOfTheLog(t *testing.T) {
	var out bytes.Buffer
	newLogger(&out, false).Info("late", "time", 3*time.Second)
	if line := out.String(); !strings.Contains(line, "msg=late time=3s") {
		t.Errorf("line %q", line)
	}
	out.Reset()
	newLogger(&out, false).Info("late", "deleted", "a\x7fb", "turned", "a\u202eb")
	if line := out.String(); strings.ContainsAny(line, "\x7f\u202e") {
		t.Errorf("line %q", line)
	}
}

// An error may quote text from a store or a worker.
func TestErrorsOnATerminal(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run(t.Context(), Parts{}, []string{"run", "--no\x1b[2J\u202eflag"}, nil, &out, &errs); code != 64 {
		t.Errorf("exit code %d", code)
	}
	if said := errs.String(); !strings.Contains(said, `--no\x1b[2J\u202eflag`) || strings.ContainsAny(said, "\x1b\u202e") {
		t.Errorf("the error is %q", said)
	}
}
