package cmd_test

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const teamGroup = 30000

// TestGroupOfUsers: two members of a group save, list, load and verify in one store, each
// with a umask that would lock out the other, and take it over from each other when the
// owner is killed. A user who is not a member has no access.
func TestGroupOfUsers(t *testing.T) {
	t.Parallel()
	n := neighbours(t)
	a, b, other := n.user(20001, teamGroup), n.user(20002, teamGroup), n.user(20003)
	a.umask, b.umask = "022", "077"
	dir := filepath.Join(n.dir, "team", "store")
	if err := os.Mkdir(filepath.Dir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Dir(dir), a.uid, -1); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil { //nolint:gosec // all may come here
		t.Fatal(err)
	}
	at := " --store " + dir
	a.run(0, fmt.Sprint("ckptstore init --shared=", teamGroup, at))
	train := func(run string, steps int) string {
		return fmt.Sprint("trainer run -q", at, " --name ", run, " --nproc 2 -- trainer demo-worker --save-every=2 --steps=", steps)
	}
	a.run(0, train("of-a", 4))
	groups(t, dir)
	b.run(0, train("of-b", 4))
	groups(t, dir)
	for _, u := range []neighbour{a, b} {
		if list := u.run(0, "ckptstore ls"+at); !strings.Contains(list, "of-a") || !strings.Contains(list, "of-b") {
			t.Errorf("user %d lists\n%s", u.uid, list)
		}
		for _, run := range []string{"of-a", "of-b"} {
			u.run(0, "ckptstore cat "+run+" model.layer1.weight"+at)
		}
		if said := u.run(0, "ckptstore verify"+at); !strings.Contains(said, " 0 findings") {
			t.Errorf("user %d finds\n%s", u.uid, said)
		}
		u.run(0, fmt.Sprint("ckptstore tag of-a@step-4.a1 by-", u.uid, at))
	}

	// Each resumes the other's run while the other owns the store, and becomes the owner
	// once that process is killed.
	for i, turn := range [][2]neighbour{{a, b}, {b, a}} {
		owner, next := turn[0], turn[1]
		serve := owner.command("exec ckptstore serve" + at)
		serve.SysProcAttr.Setpgid = true
		if err := serve.Start(); err != nil {
			t.Fatal(err)
		}
		waitOwner(t, dir, serve.Process.Pid)
		next.run(0, train("of-a", 6+2*i)) // through the other's socket
		job := next.command(train(fmt.Sprint("during-", i), 12))
		killedDuring(t, dir, job, serve, func() {
			if closed(t, dir, owner.uid) { // killed before it gave a file to the group
				owner.run(0, "ckptstore ls"+at)
			}
		})
		groups(t, dir)
		next.run(0, "ckptstore verify"+at)
		owner.run(0, train(fmt.Sprint("during-", i), 14)) // the killed user works again
		groups(t, dir)
	}
	for _, line := range []string{"ckptstore ls" + at, "ckptstore ls --offline" + at, "ckptstore tag of-a x" + at, "cat " + dir + "/store.json", "ls " + dir, train("of-other", 2)} {
		if out, err := other.command(line).CombinedOutput(); err == nil {
			t.Errorf("a user who is not a member: %s\n%s", line, out)
		}
	}
	b.run(0, "ckptstore gc --policy last=1 --apply"+at)
	a.run(0, "ckptstore verify"+at)
}

// closed reports whether a user has left a file of the log that the group cannot write.
func closed(t *testing.T, dir string, uid int) (found bool) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(dir, "log"), func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it is gone
		}
		info, err := e.Info()
		if err != nil {
			return nil //nolint:nilerr // as above
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		found = found || ok && int(st.Uid) == uid && info.Mode().Perm()&0o060 != 0o060
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// killedDuring kills the owner of a store once a job has committed a checkpoint in it, and
// then calls tidy. The job continues.
func killedDuring(t *testing.T, dir string, job, owner *exec.Cmd, tidy func()) {
	t.Helper()
	before := len(receiptsIn(t, dir))
	out := &watched{seen: make(chan struct{})}
	job.Stdout, job.Stderr = out, out
	if err := job.Start(); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(shareLimit)
	for len(receiptsIn(t, dir)) == before {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("nothing was saved within %v:\n%s", shareLimit, out.String())
		}
	}
	if err := owner.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = owner.Wait()
	tidy()
	if err := job.Wait(); err != nil {
		t.Errorf("the job whose owner was killed: %v\n%s", err, out.String())
	}
}

// groups checks that the group can write everything in a shared store.
func groups(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok || st.Gid != teamGroup {
			t.Errorf("%s is of group %d", path, st.Gid)
		}
		want := fs.FileMode(0o660)
		if e.IsDir() {
			want = 0o770
			if info.Mode()&fs.ModeSetgid == 0 {
				t.Errorf("%s has no set-group-ID bit", path)
			}
		}
		if info.Mode().Perm()&want != want || info.Mode().Perm()&0o007 != 0 && path == dir {
			t.Errorf("%s has the mode %v", path, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
