package cmd_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/object/faultproxy"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
	"github.com/ckptstore/ckptstore/tensor"
)

// savedEnv makes this program a rank that saves once.
const savedEnv = "CKPTSTORE_TEST_SAVE"

// savedBytes of a rank are three parts.
const (
	savedBytes = 65 << 20
	savedParts = 2 * 3
)

// saveOnce saves a state that depends on the run and the rank, or after a resumption checks it.
func saveOnce(ctx context.Context) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	want, run := make([]byte, savedBytes), crc32.ChecksumIEEE([]byte(os.Getenv("CKPTSTORE_RUN")))
	for i := 0; i < len(want); i += 8 {
		binary.LittleEndian.PutUint64(want[i:], uint64(i+c.Rank)*0x9e3779b97f4a7c15+uint64(run))
	}
	state := client.State{Tensors: []client.Tensor{{Data: want, Shard: tensor.Shard{
		FQN: "w", DType: tensor.Uint8, Global: tensor.Shape{2, savedBytes},
		Box: tensor.Box{Offsets: []int64{int64(c.Rank), 0}, Sizes: []int64{1, savedBytes}},
	}}}}
	if c.Resume == "" {
		s, err := c.Save(ctx, 1, state, client.SaveOptions{})
		if err != nil {
			return err
		}
		return s.Wait(ctx, client.Committed)
	}
	state.Tensors[0].Data = make([]byte, savedBytes)
	if _, err := c.Load(ctx, &state, client.LoadOptions{Ref: c.Resume, Strict: true}); err != nil {
		return err
	}
	if !bytes.Equal(state.Tensors[0].Data, want) {
		return fmt.Errorf("rank %d: %s has other bytes than were saved", c.Rank, c.Resume)
	}
	return nil
}

// TestKilledAtEveryRequest kills the trainer at each request of a save to a bucket, before and
// after the server has acted. The next trainer of the run finishes the save, and sends only
// the parts that the server lacks, or the checkpoint does not exist and no upload is left.
func TestKilledAtEveryRequest(t *testing.T) {
	server := s3test.Start(t, s3test.Options{})
	proxy, err := faultproxy.Start(faultproxy.Options{Target: server.Endpoint, Key: server.Key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := proxy.Close(); err != nil {
			t.Error(err)
		}
	})
	env := append(os.Environ(), savedEnv+"=1", "AWS_ACCESS_KEY_ID="+server.Key.Access, "AWS_SECRET_ACCESS_KEY="+server.Key.Secret,
		"AWS_REGION="+server.Region, "AWS_EC2_METADATA_DISABLED=true", "NO_COLOR=1")
	dir := filepath.Join(t.TempDir(), "store")
	run := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = env
		return cmd
	}
	if out, err := run("ckptstore", "init", "--store", dir, "--data", "s3://"+server.Bucket+"/p?endpoint="+proxy.URL()).CombinedOutput(); err != nil {
		t.Fatalf("init: %v\n%s", err, out)
	}
	job := func(name string) *exec.Cmd {
		return run("trainer", "run", "--store", dir, "--name", name, "--nproc", "2", "--grace=1s", "--", os.Args[0])
	}

	// The requests of a whole save, without those that open the store.
	of := func(name string) func(faultproxy.Request) bool {
		return func(r faultproxy.Request) bool {
			return strings.Contains(r.Key, "/"+name+"/") || strings.Contains(r.Query.Get("prefix"), "/"+name+"/")
		}
	}
	whole := proxy.Inject(faultproxy.Fault{Match: of("whole"), Do: faultproxy.Delay(0)})
	if out, err := job("whole").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	requests := whole.Hits()
	whole.Remove()
	if requests < savedParts+5 {
		t.Fatalf("a save has %d requests", requests)
	}

	resumed, killed := 0, 0
	for k := range requests {
		for _, when := range []faultproxy.When{faultproxy.Before, faultproxy.After} {
			name := fmt.Sprintf("kill-%d-%d", k, when)
			cmd := job(name)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			acted := proxy.Inject(faultproxy.Fault{Match: func(r faultproxy.Request) bool { return of(name)(r) && r.Class == faultproxy.Part }, Do: faultproxy.Delay(0)})
			fault := proxy.Inject(faultproxy.Fault{Match: of(name), Skip: k, Times: 1, Do: faultproxy.Stop(when, func(faultproxy.Request) { _ = cmd.Process.Kill() })})
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			err := cmd.Wait()
			switch {
			case diedOf(cmd) == syscall.SIGKILL:
				killed++
			case err != nil:
				t.Fatalf("%s: %v\n%s", name, err, out.String())
			}
			waitGone(t, name)
			fault.Remove()
			acted.Remove()
			sent := acted.Hits()
			proxy.Resume()

			proxy.Reset()
			again, err := job(name).CombinedOutput()
			if err != nil {
				t.Fatalf("%s, after the kill: %v\n%s\nbefore it:\n%s", name, err, again, out.String())
			}
			if !bytes.Contains(again, []byte("adopted staged save")) {
				continue
			}
			resumed++
			counts := proxy.Reset()
			// The parts of which the answer was lost were cut off, at most 8 at a time.
			parts := counts.Of(faultproxy.Part).Requests
			t.Logf("%s: %d parts sent before the kill, %d after it, of %d requests", name, sent, parts, counts.Of().Requests)
			if bytes.Contains(again, []byte("checkpoint aborted")) {
				t.Errorf("%s: the save was not finished:\n%s", name, again)
			}
		}
	}
	t.Logf("%d requests a save, %d kills, %d saves finished by the next trainer", requests, killed, resumed)
	if killed < requests || resumed < requests/2 {
		t.Errorf("%d kills and %d finished saves of %d requests: too few", killed, resumed, requests)
	}
	if out, err := run("ckptstore", "verify", "--store", dir).CombinedOutput(); err != nil {
		t.Errorf("verify: %v\n%s", err, out)
	}
	checkNoUploads(t, server, time.Now().Add(10*time.Second))
}

// checkNoUploads makes sure that the server has no unfinished upload, of which trainers may
// remove the last ones in the background.
func checkNoUploads(t *testing.T, server *s3test.Server, until time.Time) {
	t.Helper()
	if server.MinIO {
		return // it keeps them elsewhere
	}
	for {
		var left []string
		err := filepath.WalkDir(filepath.Join(server.Dir, ".sgwtmp", "multipart"), func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				left = append(left, path)
			}
			return err
		})
		switch {
		case err != nil:
			t.Fatal(err)
		case len(left) == 0:
			return
		case time.Now().After(until):
			t.Fatalf("unfinished uploads are left: %s", strings.Join(left, ", "))
		}
		time.Sleep(50 * time.Millisecond)
	}
}
