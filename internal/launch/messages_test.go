package launch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	workers "github.com/ckptstore/ckptstore/client/rpc"
	"github.com/ckptstore/ckptstore/internal/rpc"
)

// openAgent opens an agent of a backend over the trainer's messages for it. Every
// rank calls it.
func openAgent(ctx context.Context, c *client.Client, backend string) (rpc.Agent, error) {
	return workers.Open(ctx, c, workers.NewRegistry(), backend, nil)
}

// answer is a rank's reply to a body.
func answer(rank int, body []byte) []byte { return append(bytes.Clone(body), byte(rank)) }

// callAll calls every rank with small and large bodies.
func callAll(ctx context.Context, c *client.Client, backend string) error {
	a, err := openAgent(ctx, c, backend)
	if err != nil {
		return err
	}
	if err := a.Handle("answer", func(_ context.Context, body []byte) ([]byte, error) { return answer(c.Rank, body), nil }); err != nil {
		return err
	}
	if err := meet(ctx, c); err != nil { // all have registered the function
		return err
	}
	for _, size := range []int{0, 100, 5 << 20} {
		body := bytes.Repeat([]byte{byte(c.Rank + 1)}, size)
		for rank := range c.WorldSize {
			got, err := a.Call(ctx, client.AgentName(rank), "answer", body)
			if err != nil {
				return err
			}
			if !bytes.Equal(got, answer(rank, body)) {
				return fmt.Errorf("rank %d answered %d bytes of another content to %d", rank, len(got), size)
			}
		}
	}
	if err := a.Shutdown(ctx); err != nil {
		return err
	}
	emit("called all by %s", backend)
	return nil
}

var calls = workerRole("calls the other ranks", func(ctx context.Context, c *client.Client) error {
	for _, backend := range []string{rpc.ProcessGroup, rpc.TensorPipe, rpc.TensorPipe} {
		if err := callAll(ctx, c, backend); err != nil {
			return fmt.Errorf("%s: %w", backend, err)
		}
	}
	// The messenger of the first agent is closed.
	if err := c.Messenger().Send(ctx, (c.Rank+1)%c.WorldSize, nil); !errors.Is(err, rpc.ErrClosed) {
		return fmt.Errorf("after the agent's end: %w", err)
	}
	return nil
})

// Agents of both kinds call each other between processes, over the trainer's
// messages.
func TestAgentsOfProcesses(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, calls...).start()
	if err := endsIn(j, long); err != nil {
		t.Fatal(err)
	}
	for rank := range 3 {
		for _, backend := range []string{rpc.ProcessGroup, rpc.TensorPipe} {
			wantText(t, j.out, fmt.Sprintf("[rank%d] called all by %s\n", rank, backend))
		}
	}
}

// endsIn waits for the end of a job that was started.
func endsIn(j *job, limit time.Duration) error {
	j.t.Helper()
	select {
	case err := <-j.done:
		j.ended = true
		j.cancel(nil)
		return err
	case <-time.After(limit):
		j.t.Fatal("the job does not end")
		return nil
	}
}

var diesInCall = workerRole("dies in a call", func(ctx context.Context, c *client.Client) error {
	signal.Ignore(syscall.SIGTERM) // which the trainer sends to the remaining ranks
	a, err := openAgent(ctx, c, rpc.ProcessGroup)
	if err != nil {
		return err
	}
	if err := a.Handle("die", func(ctx context.Context, _ []byte) ([]byte, error) {
		if err := syscall.Kill(syscall.Getpid(), syscall.SIGKILL); err != nil {
			return nil, err
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}); err != nil {
		return err
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	if c.Rank == 1 {
		<-ctx.Done()
		return ctx.Err()
	}
	if c.Rank == 0 {
		_, err := a.Call(ctx, client.AgentName(1), "die", nil)
		emit("call: gone %t, %v", errors.Is(err, rpc.ErrGone), err)
	}
	// A rank that did not call it learns of it too, by the report or by sending.
	_, err = a.Call(ctx, client.AgentName(1), "die", nil)
	emit("call after: gone %t, %v", errors.Is(err, rpc.ErrGone), err)
	return a.Close()
})

// The end of a rank's process ends the calls to it, with an error that names it:
// long before the callers' own deadline, and before the group is killed.
func TestCalledProcessDies(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, diesInCall...)
	j.cfg.Grace = long
	j.start()
	failed := failedOf(t, endsIn(j, long))
	wantText(t, j.out, "[rank0] call: gone true, call die of rank1 (rank 1): ")
	for _, rank := range []int{0, 2} {
		wantText(t, j.out, fmt.Sprintf("[rank%d] call after: gone true, call die of rank1 (rank 1): ", rank))
	}
	if failed.Rank != 1 || !strings.Contains(failed.Cause, "SIGKILL") {
		t.Errorf("cause %q of rank %d", failed.Cause, failed.Rank)
	}
}

var locksWithAgent = workerRole("locks with an agent", func(ctx context.Context, c *client.Client) error {
	if _, err := openAgent(ctx, c, rpc.ProcessGroup); err != nil {
		return err
	}
	if err := c.Report(ctx, 1, nil); err != nil {
		return err
	}
	if c.Rank == 1 {
		stuckInALock()
	}
	return c.Report(ctx, 2, nil)
})

// A rank that hangs is silent, though its agent waits for messages.
func TestHangWithAgent(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, locksWithAgent...)
	failed := failedOf(t, j.hangs(0))
	if !strings.HasPrefix(failed.Cause, "rank 1 silent for ") || !strings.Contains(failed.Cause, "rank 0 waits for it") {
		t.Errorf("cause %q", failed.Cause)
	}
}

// A message whose reply was lost is repeated; no other is. A message that is too
// large, or from an impossible sender, is rejected.
func TestMessageRequests(t *testing.T) {
	t.Parallel()
	_, ranks := doors(t, 2)
	ok := func(status int, reply, want string) {
		t.Helper()
		if status != 200 || reply != want {
			t.Errorf("status %d, %q; want %q", status, reply, want)
		}
	}
	refused := func(status int, reply string, want int, says string) {
		t.Helper()
		if status != want || !strings.Contains(reply, says) {
			t.Errorf("status %d, %q; want %d, %q", status, reply, want, says)
		}
	}
	send := func(from int, body string, header ...string) (int, string) {
		return ranks[from].post("send", body, header...)
	}
	recv := func(rank int, seq string) (int, string) {
		return ranks[rank].post("recv", "{}", client.HeaderSeq, seq)
	}
	for _, body := range []string{"one", "two"} {
		status, reply := send(0, body, client.HeaderTo, "1")
		ok(status, reply, "")
	}
	for _, c := range []struct{ seq, want string }{{"1", "one"}, {"1", "one"}, {"2", "two"}, {"2", "two"}} {
		status, reply := recv(1, c.seq)
		ok(status, reply, c.want)
	}
	for _, seq := range []string{"0", "1", "4"} {
		status, reply := recv(1, seq)
		refused(status, reply, 400, "message "+seq+" is not the next one: 2 were received")
	}
	status, reply := recv(1, "")
	refused(status, reply, 400, client.HeaderSeq)
	for _, to := range []string{"", "-1", "2"} {
		status, reply := send(0, "x", client.HeaderTo, to)
		refused(status, reply, 400, "want a rank below 2")
	}
	status, reply = ranks[0].post("get", `{"key":""}`)
	refused(status, reply, 400, "a key of 0 bytes")
	status, reply = ranks[0].post("set", `{"key":"a","value":"aGVsbG8="}`)
	ok(status, reply, "{}")
	status, reply = ranks[1].post("get", `{"key":"a"}`)
	ok(status, reply, `{"value":"aGVsbG8="}`)
	most := strings.Repeat("AAAA", client.MaxStored/3)
	status, reply = ranks[0].post("set", `{"key":"b","value":"`+most+`"}`)
	refused(status, reply, 507, "leave large values in files")

	status, reply = send(1, "", client.HeaderGone, "1")
	ok(status, reply, "")
	status, reply = send(0, "x", client.HeaderTo, "1")
	refused(status, reply, 409, "rank 1 no longer receives messages")
	status, reply = send(1, "x", client.HeaderTo, "0")
	refused(status, reply, 410, "rank 1 of attempt 1 can no longer send or receive messages")
	status, reply = recv(1, "3")
	refused(status, reply, 410, "rank 1 of attempt 1")
}
