package agent_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"os/exec"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/agent"
)

// rank is one rank of a session, whose requests the test makes.
type rank struct {
	t    *testing.T
	n    int
	proc *exec.Cmd
	agent.JoinReply
}

// request returns a request to join.
func request(key, run string, n, world, pid int) agent.JoinRequest {
	return agent.JoinRequest{Protocols: []int{client.Protocol}, Key: key, Run: run, Rank: n, WorldSize: world, PID: pid}
}

// join makes sleeping processes the ranks of a group.
func join(t *testing.T, c agent.Card, key, run string, world int) []*rank {
	t.Helper()
	return joinTrial(t, c, key, run, "", world)
}

// joinTrial is join for a trial of the run.
func joinTrial(t *testing.T, c agent.Card, key, run, trial string, world int) []*rank {
	t.Helper()
	ranks := make([]*rank, world)
	errs := make(chan error, world)
	for n := range world {
		r := &rank{t: t, n: n, proc: sleeper(t)}
		ranks[n] = r
		go func() {
			var err error
			asked := request(key, run, n, world, r.proc.Process.Pid)
			asked.Trial = trial
			r.JoinReply, err = post[agent.JoinReply](t.Context(), c.Socket, c.Token, "join", asked)
			errs <- err
		}()
	}
	for range world {
		if err := <-errs; err != nil {
			t.Fatalf("join %s: %v", run, err)
		}
	}
	for _, r := range ranks {
		must[client.Context](r, "hello", client.Hello{Protocols: []int{client.Protocol}, PID: r.proc.Process.Pid})
	}
	return ranks
}

// must makes a request of the rank that must succeed.
func must[Out any](r *rank, name string, in any) Out {
	r.t.Helper()
	out, err := post[Out](r.t.Context(), r.Socket, r.Token, name, in)
	if err != nil {
		r.t.Fatalf("%s of rank %d: %v", name, r.n, err)
	}
	return out
}

// begin gets a slot for a value of the rank and fills it with its number.
func (r *rank) begin(step int64, size int) client.SaveReply {
	r.t.Helper()
	reply := must[client.SaveReply](r, "save", client.SaveRequest{Step: step, Items: []client.Item{{FQN: "v", Value: true, PerRank: true, Bytes: int64(size)}}})
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(r.n + int(step))
	}
	r.write(reply, data, reply.Offsets[0])
	return reply
}

func (r *rank) write(s client.SaveReply, data []byte, at int64) {
	r.t.Helper()
	f, err := os.OpenFile(s.Arena, os.O_WRONLY, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt(data, at); err != nil {
		r.t.Fatal(err)
	}
}

// mark marks the slot as complete.
func (r *rank) mark(s client.SaveReply) {
	r.t.Helper()
	r.write(s, binary.LittleEndian.AppendUint64(nil, s.Generation), 8)
}

// seal reports to the agent that the slot is complete.
func (r *rank) seal(s client.SaveReply) {
	r.t.Helper()
	r.mark(s)
	must[struct{}](r, "seal", client.CheckpointRef{Checkpoint: s.Checkpoint})
}

func (r *rank) wait(id, state string) client.WaitReply {
	r.t.Helper()
	return must[client.WaitReply](r, "wait", client.WaitRequest{Checkpoint: id, State: state})
}

// written returns a context for one request, and a channel that is closed when
// the request is sent.
func written(ctx context.Context) (context.Context, <-chan struct{}) {
	sent := make(chan struct{})
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { close(sent) }}), sent
}

// waits is wait in two halves: when it returns, the request is on its way; the
// returned function waits for the reply.
func (r *rank) waits(id, state string) func() (client.WaitReply, error) {
	r.t.Helper()
	ctx, sent := written(r.t.Context())
	var reply client.WaitReply
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		reply, err = post[client.WaitReply](ctx, r.Socket, r.Token, "wait", client.WaitRequest{Checkpoint: id, State: state})
	}()
	select {
	case <-sent:
	case <-done:
		r.t.Fatalf("wait of rank %d: %+v, %v", r.n, reply, err)
	}
	must[struct{}](r, "heartbeat", struct{}{}) // connections are accepted in order
	return func() (client.WaitReply, error) {
		<-done
		return reply, err
	}
}

// asks sends only the beginning of a wait request; the returned function sends
// the rest, and waits for the reply.
func (r *rank) asks(id, state string) func() (client.WaitReply, error) {
	r.t.Helper()
	conn, err := net.Dial("unix", r.Socket)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = conn.Close() })
	body, err := json.Marshal(client.WaitRequest{Checkpoint: id, State: state})
	if err != nil {
		r.t.Fatal(err)
	}
	_, err = fmt.Fprintf(conn, "POST /v1/wait HTTP/1.1\r\nHost: agent\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", r.Token, len(body), body[:1])
	if err != nil {
		r.t.Fatal(err)
	}
	must[struct{}](r, "heartbeat", struct{}{}) // connections are accepted in order
	return func() (out client.WaitReply, err error) {
		if _, err := conn.Write(body[1:]); err != nil {
			return out, err
		}
		reply, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return out, err
		}
		defer func() { _ = reply.Body.Close() }()
		return out, json.NewDecoder(reply.Body).Decode(&out)
	}
}

func (r *rank) leave() {
	r.t.Helper()
	must[struct{}](r, "leave", struct{}{})
}

// together calls do for all ranks at once.
func together[Out any](ranks []*rank, do func(*rank) Out) []Out {
	out := make([]Out, len(ranks))
	done := make(chan struct{}, len(ranks))
	for n, r := range ranks {
		go func() {
			defer func() { done <- struct{}{} }()
			out[n] = do(r)
		}()
	}
	for range ranks {
		<-done
	}
	return out
}

// commit saves a step with all ranks and waits for the commit.
func commit(t *testing.T, ranks []*rank, step int64) string {
	t.Helper()
	saves := together(ranks, func(r *rank) client.SaveReply { return r.begin(step, 100) })
	for n, r := range ranks {
		r.seal(saves[n])
	}
	if got := ranks[0].wait(saves[0].Checkpoint, client.Committed); got.State != client.Committed {
		t.Fatalf("save of step %d: %+v", step, got)
	}
	return saves[0].Checkpoint
}
