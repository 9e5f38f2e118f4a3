package trainer_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/trainer"
)

type storage struct{ trainer.Storage }

// An option that cannot be applied ends the program with 64, and the error
// includes the next step.
func TestRefusedOptions(t *testing.T) {
	backend := trainer.DefaultBackend{}
	hook := func(context.Context, *trainer.Group) error { return nil }
	for says, options := range map[string][]trainer.Option{
		`trainer: register backend "mesh": it is nil: give WithBackend a value`:                                           {trainer.WithBackend("mesh", nil)},
		`trainer: register backend "mesh": it is already registered; choose another name`:                                 {trainer.WithBackend("mesh", backend), trainer.WithBackend("mesh", backend)},
		`trainer: register backend "torch": it is already registered; choose another name`:                                {trainer.WithBackend("torch", backend)},
		`trainer: set the init hook: there is one already: give one WithInitHook, whose function calls both`:              {trainer.WithInitHook(hook), trainer.WithInitHook(hook)},
		`trainer: set the storage trainer_test.storage: there is one already, trainer_test.storage: give one WithStorage`: {trainer.WithStorage(storage{}), trainer.WithStorage(storage{})},
	} {
		if code, said := version(t, options...); code != 64 || strings.TrimSpace(said) != says {
			t.Errorf("exit code %d, %q, want 64 and %q", code, said, says)
		}
	}
	if code, said := version(t, trainer.WithBackend("mesh", backend), trainer.WithInitHook(hook), trainer.WithStorage(storage{})); code != 0 || said != "" {
		t.Errorf("one of each: exit code %d, %q", code, said)
	}
}

// version runs the program with --version, and returns its exit code and standard error.
func version(t *testing.T, options ...trainer.Option) (code int, said string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "stderr")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	args, stderr := os.Args, os.Stderr
	defer func() { os.Args, os.Stderr = args, stderr }()
	os.Args, os.Stderr = []string{"trainer", "--version"}, file
	code = trainer.Main(t.Context(), options...)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return code, string(text)
}
