//go:build testbed || outlive

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// preloadProgram leaves a file that names its attempt, rank, node, and whether a module that it
// does not import was imported in advance. It ends like the ranks of a cluster.
const preloadProgram = `import os, socket, sys, time
lives = "` + livesAt + `"
name = "-".join(["ready", os.environ["CKPTSTORE_ATTEMPT"], os.environ["RANK"], socket.gethostname(), str("decimal" in sys.modules)])
open(os.path.join(lives, name), "w").close()
while not os.path.exists(os.path.join(lives, "` + finishFile + `")):
    time.sleep(0.05)
`

// A spare has a process in reserve that has imported what its ranks will import. When a node loses
// its power, that process becomes the rank of the spare, and those of the others the other ranks.
func TestPreloadedSpare(t *testing.T) {
	t.Parallel()
	python := must[string](t)(exec.LookPath("python3"))
	ctx, c := start(t, threeNodes())
	check(t, os.WriteFile(filepath.Join(c.lives, "train.py"), []byte(preloadProgram), 0o600))
	s := &scene{t: t, ctx: ctx, cluster: c, job: job{
		nnodes: "2", nproc: 1, timeout: firm, command: []string{python, livesAt + "/train.py"}, more: []string{"--preload", "decimal"},
	}}
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	s.b = s.launch("b")
	s.ready("ready-1-0-a-True", "ready-1-1-b-True")
	s.c = s.launch("c")
	check(t, s.a.prints(ctx, `msg="node joined" node=2`))
	for _, name := range []string{"a", "c"} { // a has started the next one after its first rank
		check(t, await(ctx, "a process in reserve on "+name, func() (bool, error) { return s.reserved(name) }))
	}
	check(t, s.node("b").PowerOff())
	s.ready("ready-2-0-a-True", "ready-2-1-c-True")
	check(t, s.finish())
	s.ended(s.a, s.c)
	for _, m := range []*machine{s.node("a"), s.node("c")} {
		if all := must[int](t)(s.pythonsOn(m)); all > 0 {
			t.Errorf("%d interpreters are left on %s", all, m.Name())
		}
	}
}

// ready waits for files of ranks.
func (s *scene) ready(names ...string) {
	s.t.Helper()
	for _, name := range names {
		check(s.t, await(s.ctx, name, func() (bool, error) {
			_, err := os.Stat(filepath.Join(s.lives, name))
			return err == nil, nil
		}))
	}
}

// reserved reports whether a node has an interpreter without a rank.
func (s *scene) reserved(name string) (bool, error) {
	all, err := s.pythonsOn(s.node(name))
	if err != nil {
		return false, err
	}
	ranks := 0
	if name != "c" {
		ranks = 1
	}
	return all > ranks, nil
}

// pythonsOn counts the interpreters on a node.
func (c *cluster) pythonsOn(m *machine) (n int, err error) {
	all, err := m.Processes()
	for _, p := range all {
		line, rerr := os.ReadFile(filepath.Join("/proc", fmt.Sprint(p.PID), "cmdline"))
		if rerr == nil && strings.Contains(string(line), "train.py") && strings.Contains(filepath.Base(strings.Split(string(line), "\x00")[0]), "python") && p.State != "Z" {
			n++
		}
	}
	return n, err
}
