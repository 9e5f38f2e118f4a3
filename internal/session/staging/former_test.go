package staging

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFormerLayout checks that a starting trainer logs what dead trainers of a
// former version left of its store, and leaves it in place. It logs nothing about
// files of live trainers, other stores and other users.
func TestFormerLayout(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test gives a directory to another user: run it as root")
	}
	shared := t.TempDir()
	former := func(store, run string) (dir string) {
		dir = filepath.Join(shared, "ckptstore-"+storeName(store)+"-"+run+"-n0")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, bytes := range map[string]int{"lock": 0, "r00000.save.1": 4096, "r00001.save.2": 8192} {
			if err := os.WriteFile(filepath.Join(dir, name), make([]byte, bytes), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	opens := func(run string) string {
		t.Helper()
		var said bytes.Buffer
		a, err := Open(shared, storeA, run, 0, nil, slog.New(slog.NewTextHandler(&said, nil)))
		if err != nil {
			t.Fatal(err)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		return said.String()
	}
	former(storeB, "foreign")
	if err := os.Chown(former(storeA, "theirs"), 20002, 20002); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Open(filepath.Join(former(storeA, "alive"), "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if said := opens("before"); said != "" {
		t.Errorf("without anything left: %s", said)
	}
	dead := former(storeA, "dead")
	said := opens("after")
	for _, want := range []string{"level=WARN", "gc --staging", "bytes=12288", "[" + dead + "]"} {
		if !strings.Contains(said, want) {
			t.Errorf("%s is not in: %s", want, said)
		}
	}
	if freed, n, err := Free(shared, storeA); err != nil || len(freed) != 1 || freed[0] != dead || n != 12288 {
		t.Errorf("freed %q, %d bytes, %v", freed, n, err)
	}
	if said := opens("freed"); said != "" {
		t.Errorf("after it was freed: %s", said)
	}
}
