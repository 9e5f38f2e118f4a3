package cmd_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// neighbourhood is a directory that every user can enter, with the built commands.
type neighbourhood struct {
	t   *testing.T
	dir string
}

// neighbour is another Unix user of this machine.
type neighbour struct {
	of     neighbourhood
	uid    int
	groups []int
	home   string // of this user alone
	umask  string // octal; default that of the test
}

// neighbours needs root: each neighbour is a real user of this machine.
func neighbours(t *testing.T) neighbourhood {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it runs processes as other users")
	}
	dir, err := os.MkdirTemp("/tmp", "ckn") //nolint:usetesting // other users cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // so that they can
		t.Fatal(err)
	}
	for _, name := range []string{"ckptstore", "trainer"} {
		if err := copyProgram(filepath.Join(bin, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return neighbourhood{t, dir}
}

func (n neighbourhood) user(uid int, groups ...int) neighbour {
	n.t.Helper()
	u := neighbour{of: n, uid: uid, groups: groups, home: filepath.Join(n.dir, fmt.Sprint(uid))}
	for _, dir := range []string{u.home, filepath.Join(u.home, "run"), filepath.Join(u.home, "tmp")} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			n.t.Fatal(err)
		}
		if err := os.Chown(dir, uid, uid); err != nil {
			n.t.Fatal(err)
		}
	}
	return u
}

// command returns a shell line that runs as the user.
func (u neighbour) command(line string) *exec.Cmd {
	if u.umask != "" {
		line = "umask " + u.umask + "; " + line
	}
	cmd := exec.CommandContext(u.of.t.Context(), "/bin/sh", "-c", line)
	cmd.Dir = u.of.dir
	cmd.Env = []string{
		"PATH=" + u.of.dir + ":/usr/bin:/bin", "HOME=" + u.home, "TMPDIR=" + filepath.Join(u.home, "tmp"),
		"XDG_RUNTIME_DIR=" + filepath.Join(u.home, "run"), raceEnv + "=" + os.Getenv(raceEnv),
	}
	groups := make([]uint32, len(u.groups))
	for i, g := range u.groups {
		groups[i] = uint32(g) //nolint:gosec // a small number
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(u.uid), Gid: uint32(u.uid), Groups: groups}} //nolint:gosec // as above
	return cmd
}

// run runs a shell line, checks its exit code and returns its output.
func (u neighbour) run(code int, line string) string {
	u.of.t.Helper()
	cmd := u.command(line)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		u.of.t.Fatalf("user %d: %s: %v", u.uid, line, err)
	}
	if got := cmd.ProcessState.ExitCode(); got != code {
		u.of.t.Errorf("user %d: %s: exit code %d, want %d\n%s", u.uid, line, got, code, out)
	}
	return string(out)
}

// TestStoreThatOthersCanWrite: commands do not open a store for writing while other users
// can write to it or a part of it, unless its user trusts it.
func TestStoreThatOthersCanWrite(t *testing.T) {
	t.Parallel()
	n := neighbours(t)
	victim, dir := n.user(20001), filepath.Join(n.dir, "20001", "store")
	victim.run(0, "ckptstore init --store "+dir+" && chmod 755 $HOME "+dir)
	const opened = 4 // no such checkpoint: the store was opened
	tag := "ckptstore tag none x --store " + dir
	victim.run(opened, tag)

	for _, path := range []string{dir, filepath.Join(dir, "data"), filepath.Join(dir, "log"), filepath.Join(dir, "LOCK")} {
		victim.run(0, "chmod o+w "+path)
		for _, line := range []string{tag, "ckptstore verify --repair --store " + dir, "trainer run -q --store " + dir + " --name a -- true"} {
			if said := victim.run(12, line); !strings.Contains(said, "every user can write to "+path) || !strings.Contains(said, "ckptstore config trust "+dir) {
				t.Errorf("%s: %s", path, said)
			}
		}
		victim.run(0, "chmod o-w "+path)
	}
	victim.run(opened, tag)

	victim.run(0, "chmod 777 "+dir)
	schema(t, "config-trust", victim.run(0, "ckptstore config trust --json "+dir))
	victim.run(opened, tag)
	schema(t, "config-trust-list", victim.run(0, "ckptstore config trust --list --json"))
	if list := victim.run(0, "ckptstore config trust --list --json"); !strings.Contains(list, dir) {
		t.Error(list)
	}
	victim.run(0, "ckptstore config trust --remove "+dir)
	victim.run(12, tag)
	victim.run(4, "ckptstore config trust --remove "+dir)
	victim.run(0, "chmod 755 "+dir)

	// A store of another user, opened by root, who can write everywhere.
	root := n.user(0)
	if said := root.run(12, tag); !strings.Contains(said, "belongs to user 20001") {
		t.Error(said)
	}
	root.run(0, "ckptstore config trust "+dir)
	root.run(opened, tag)
}

// TestInitKeepsOthersOut creates stores under every umask, also in existing directories.
// Each opens, and other users can neither write to it nor read it.
func TestInitKeepsOthersOut(t *testing.T) {
	t.Parallel()
	n := neighbours(t)
	victim, other := n.user(20001, 30000), n.user(20002, 30000)
	victim.run(0, "chmod 755 $HOME")
	for _, umask := range []string{"000", "002", "022", "077"} {
		victim.umask = umask
		for _, make := range []string{
			"D=$HOME/new-" + umask,
			"D=$HOME/old-" + umask + "; mkdir $D",
			"D=$HOME/below-" + umask + "/store; mkdir $HOME/below-" + umask + "; chgrp 30000 $HOME/below-" + umask + "; chmod 2775 $HOME/below-" + umask,
		} {
			victim.run(4, make+"; ckptstore init --store $D && ckptstore tag none x --store $D")
			where := strings.ReplaceAll(strings.Split(make, ";")[0], "$HOME", victim.home)
			for _, attack := range []string{"echo > $D/planted", "echo > $D/data/planted", "mkdir $D/views/planted", "ls $D/data", "ls $D/log"} {
				if out, err := other.command(where + "; " + attack).CombinedOutput(); err == nil {
					t.Errorf("umask %s: %s: %s\n%s", umask, where, attack, out)
				}
			}
		}
	}
}
