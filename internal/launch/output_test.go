package launch_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
)

// Output routed only to files is shown when no file can be written: otherwise it
// would be lost.
func TestOutputThatCannotBeKept(t *testing.T) {
	t.Parallel()
	files, err := logs.ParsePerRank("3")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for dir, shown := range map[string]int{t.TempDir(): 0, filepath.Join(file, "logs"): 1} {
		j := newJob(t, 1, shell("echo first; echo second >&2")...)
		j.cfg.Output = launch.Output{Dir: dir, Recorded: dir, Routes: logs.Routes{Redirects: files}}
		j.must()
		if first, second := len(j.out.lines("first")), len(j.out.lines("second")); first != shown || second != shown {
			t.Errorf("with files in %s, the terminal shows %d and %d lines, want %d of each:\n%s", dir, first, second, shown, j.out)
		}
	}
}
