package store

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestGroupWritable: a directory made under umask 002 is private if its group is the user's
// private group on this machine; with another group, or root's, it is refused.
func TestGroupWritable(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it acts as another user")
	}
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	users, err1 := os.ReadFile("/etc/passwd")
	groups, err2 := os.ReadFile("/etc/group")
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	uid, gid := 0, 0
	for line := range strings.Lines(string(users)) {
		f := strings.Split(line, ":")
		if len(f) < 4 || uid != 0 {
			continue
		}
		u, err1 := strconv.Atoi(f[2])
		g, err2 := strconv.Atoi(f[3])
		if err1 == nil && err2 == nil && u > 0 && g > 0 && privateIn(u, g, strings.NewReader(string(users)), strings.NewReader(string(groups))) {
			uid, gid = u, g
		}
	}
	if uid == 0 {
		t.Fatal("/etc/passwd and /etc/group list no user with a private group: add one with useradd")
	}
	dir := filepath.Join(forAll(t), "ckpts")
	for _, c := range []struct {
		uid, gid int
		mode     os.FileMode
		says     string // "": it opens
	}{
		{uid, gid, 0o775, ""},
		{uid, gid, 0o777, "every user can write"},
		{uid, 20002, 0o775, "group 20002 can write"},
		{0, 0, 0o770, "group 0 can write"},
	} {
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.Chown(dir, c.uid, c.gid), os.Chmod(dir, c.mode)); err != nil {
			t.Fatal(err)
		}
		err := as(c.uid, c.uid, []uint32{uint32(c.gid)}, func() error { return mayWrite(dir) })
		if c.says == "" && err != nil || c.says != "" && (!errors.Is(err, ErrUntrusted) || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("user %d, group %d, mode %#o: %v, want %q", c.uid, c.gid, c.mode, err, c.says)
		}
	}
}
