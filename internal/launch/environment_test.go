package launch_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
)

var update = flag.Bool("update", false, "write the golden files")

var printsEnvironment = role("prints its environment", func(context.Context, []string) error {
	in, err := os.Readlink("/proc/self/fd/0")
	if err != nil {
		return err
	}
	emit("stdin %s", in)
	for _, kv := range os.Environ() {
		emit("env %q", kv)
	}
	return nil
})

// given are the variables that a rank got from the trainer, and its standard
// input.
func given(t *testing.T, j *job, prefix string) (env map[string]string, stdin string) {
	t.Helper()
	env = map[string]string{}
	for _, line := range j.out.lines(prefix + "env ") {
		var kv string
		if _, err := fmt.Sscanf(line, "%q", &kv); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		name, value, _ := strings.Cut(kv, "=")
		if had, ok := os.LookupEnv(name); !ok || had != value {
			env[name] = value
		}
	}
	return env, strings.Join(j.out.lines(prefix+"stdin "), "")
}

// A worker gets every variable that torchrun sets, and the trainer's own.
func TestEnvironment(t *testing.T) {
	j := newJob(t, 2, printsEnvironment...)
	j.cfg.MaxRestarts = 3
	j.must()
	env, stdin := given(t, j, "[rank1] ")
	if stdin != os.DevNull {
		t.Errorf("standard input is %q", stdin)
	}
	for name, value := range map[string]string{
		client.EnvJob:             j.cfg.Job,
		client.EnvRun:             j.cfg.Run,
		client.EnvStoreID:         home.ID,
		"TORCHELASTIC_RUN_ID":     j.cfg.Run,
		client.EnvSocket:          filepath.Join(home.Runtime, "job-"+j.cfg.Job[28:], "a1-r1.sock"),
		client.EnvRPC:             filepath.Join(home.Runtime, "job-"+j.cfg.Job[28:], "a1-r1.rpc"),
		"TORCHELASTIC_ERROR_FILE": filepath.Join(home.Runtime, "job-"+j.cfg.Job[28:], "a1-r1.error.json"),
	} {
		if env[name] != value {
			t.Errorf("%s is %q, want %q", name, env[name], value)
		}
		env[name] = "…"
	}
	for _, name := range []string{client.EnvToken, "MASTER_PORT"} {
		if env[name] == "" {
			t.Errorf("%s is empty", name)
		}
		env[name] = "…"
	}
	var lines []string
	for name, value := range env {
		lines = append(lines, name+"="+value+"\n")
	}
	slices.Sort(lines)
	golden(t, "environment.txt", strings.Join(lines, ""))

	if said, ok := env[client.EnvQuiet]; ok {
		t.Errorf("%s is %q in a job that is not quiet", client.EnvQuiet, said)
	}
	other, _ := given(t, j, "[rank0] ")
	if other["RANK"] != "0" || other["LOCAL_RANK"] != "0" || other["ROLE_RANK"] != "0" || other["MASTER_PORT"] == "" {
		t.Errorf("rank 0 got %v", other)
	}
	if left, err := filepath.Glob(filepath.Join(home.Runtime, "job-"+j.cfg.Job[28:])); err != nil || len(left) > 0 {
		t.Errorf("the job's runtime directory is left: %v, %v", left, err)
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("not as in %s; got:\n%s\nwant:\n%s", path, got, want)
	}
}

// OMP_NUM_THREADS is the user's, or 1 where several processes share a node.
func TestThreads(t *testing.T) {
	alone := newJob(t, 1, printsEnvironment...).must()
	if env, _ := given(t, alone, ""); env["OMP_NUM_THREADS"] != "" {
		t.Errorf("a single worker is held to %s threads", env["OMP_NUM_THREADS"])
	}
	t.Setenv("OMP_NUM_THREADS", "7")
	j := newJob(t, 2, printsEnvironment...).must()
	if env, _ := given(t, j, "[rank0] "); env["OMP_NUM_THREADS"] != "" {
		t.Errorf("the user's OMP_NUM_THREADS was changed to %s", env["OMP_NUM_THREADS"])
	}
}

var meetsAtMaster = workerRole("meets at the master port", func(ctx context.Context, c *client.Client) error {
	at := net.JoinHostPort(os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT"))
	if c.Rank > 0 {
		if err := meet(ctx, c); err != nil {
			return err
		}
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", at)
		if err != nil {
			return err
		}
		return conn.Close()
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	emit("met at %s", at)
	return errors.Join(conn.Close(), l.Close())
})

// Rank 0 can bind MASTER_PORT while the trainer holds it, and the other ranks
// reach it there.
func TestMasterPort(t *testing.T) {
	t.Parallel()
	wantText(t, newJob(t, 2, meetsAtMaster...).must().out, "[rank0] met at 127.0.0.1:")
}
