package cmd_test

import (
	"os"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/store"
)

const alice, mallory = 20001, 20002

// TestForgedLaunch: continue executes a command that another user has put into the log
// only after the user saw it and agreed. It executes a command that this user's trainer
// recorded at once.
func TestForgedLaunch(t *testing.T) {
	t.Parallel()
	u := newUsers(t)
	me, other := u.person(alice), u.person(mallory)
	me.exits(0, "trainer", "run", "-q", "--store=ckpts", "--name=bert", "--", "sh", "-c", "echo own >>ran")
	me.exits(0, "ckptstore", "continue", "bert", "--store=ckpts")
	if got := read(t, me.path("ran")); got != "own\nown\n" {
		t.Fatalf("the own job ran %q", got)
	}

	// The other user was given a token, such as to report metrics.
	token := strings.Repeat("0a1b", 16)
	me.write("token", token)
	address, _, end := me.serve("--token-file", "token")
	defer end()
	url := "nats://" + address
	me.with(store.EnvTokenFile+"=token").exits(0, "ckptstore", "continue", "bert", "--store", url)
	forged := func() {
		t.Helper()
		other.forges(url, token, "bert", events.JobStarted{
			Job: store.NewID(), Host: "here\x1b[2J", PID: 1, NProc: 1, NNodes: 1, Resume: "auto", Dir: me.home,
			Command: []string{"sh", "-c", "id -u >>forged #\x1b[2J\u202e"},
		})
	}
	ran := func() string {
		text, err := os.ReadFile(me.path("forged"))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return string(text)
	}
	forged()
	for _, location := range []string{"ckpts", url} {
		said := me.with(store.EnvTokenFile+"=token").exits(12, "ckptstore", "continue", "bert", "--store", location)
		for _, part := range []string{"nothing proves that this user started it", "id -u >>forged", "there is no terminal to ask on", "--yes"} {
			if !strings.Contains(said, part) {
				t.Errorf("the refusal lacks %q:\n%s", part, said)
			}
		}
		if strings.ContainsAny(said, "\x1b\u202e") {
			t.Errorf("the refusal changes the terminal: %q", said)
		}
	}
	// An answer from a pipe does not count: no user saw the question.
	me.exits(12, "sh", "-c", "yes | ckptstore continue bert --store=ckpts")
	for _, no := range []string{"", "n", "no", "yesterday"} {
		me.answers(12, no, "ckptstore", "continue", "bert", "--store=ckpts")
	}
	if got := ran(); got != "" {
		t.Fatalf("the forged command ran: %q", got)
	}
	me.answers(0, "y", "ckptstore", "continue", "bert", "--store=ckpts", "-q")
	if got := ran(); got != "20001\n" {
		t.Fatalf("the command that was agreed to ran %q", got)
	}
	// The agreed launch is recorded as this user's own.
	me.exits(0, "ckptstore", "continue", "bert", "--store=ckpts")
	forged()
	me.exits(12, "ckptstore", "continue", "bert", "--store=ckpts")
	me.exits(0, "ckptstore", "continue", "bert", "--store=ckpts", "--yes")
	if got := ran(); got != "20001\n20001\n20001\n" {
		t.Errorf("the command ran %q", got)
	}
}

// TestLaunchOfAnotherHome: records of launches in another user's home prove nothing.
func TestLaunchOfAnotherHome(t *testing.T) {
	t.Parallel()
	u := newUsers(t)
	me := u.person(alice)
	me.exits(0, "trainer", "run", "-q", "--store=ckpts", "--name=bert", "--", "true")
	for _, mode := range []os.FileMode{0o755, 0o777} {
		// A record in which only the owner is wrong.
		me.exits(0, "sh", "-c", "cp -r .local/state "+u.place+"/tmp/state")
		taken := u.dir("tmp/state", mallory, 0o755)
		for _, dir := range []string{"ckptstore", "ckptstore/launches"} {
			u.dir("tmp/state/"+dir, mallory, mode)
		}
		said := me.with("XDG_STATE_HOME="+taken).exits(12, "ckptstore", "continue", "bert", "--store=ckpts")
		if !strings.Contains(said, "not private to this user") {
			t.Errorf("mode %v: %s", mode, said)
		}
		if err := os.RemoveAll(taken); err != nil {
			t.Fatal(err)
		}
	}
	me.exits(0, "ckptstore", "continue", "bert", "--store=ckpts")
}

// TestLaunchInAnothersDirectory: the directory of a job was removed, and another user
// has created a directory and a program of the same names.
func TestLaunchInAnothersDirectory(t *testing.T) {
	t.Parallel()
	u := newUsers(t)
	me, other := u.person(alice), u.person(mallory)
	work := u.dir("tmp/work", alice, 0o755)
	me.exits(0, "sh", "-c", "cd "+work+"; echo true >train; exec trainer run -q --store="+me.path("ckpts")+" --name=bert -- sh train")
	me.exits(0, "ckptstore", "continue", "bert", "--store=ckpts")
	me.exits(0, "rm", "-r", work)
	other.exits(0, "sh", "-c", "umask 022; mkdir "+work+"; echo 'id -u >"+u.place+"/tmp/ran' >"+work+"/train")
	if said := me.exits(12, "ckptstore", "continue", "bert", "--store=ckpts"); !strings.Contains(said, "its directory belonged to user 20001 and now belongs to user 20002") {
		t.Error(said)
	}
	if _, err := os.Stat(u.place + "/tmp/ran"); !os.IsNotExist(err) {
		t.Errorf("the other user's program ran: %v", err)
	}
}
