package launch_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// sits passes its socket and token to the test.
var sits = role("sits", func(ctx context.Context, _ []string) error {
	emit("socket %s %s %d", os.Getenv(client.EnvSocket), os.Getenv(client.EnvToken), os.Getpid())
	return untilTerm(ctx)
})

// sitsOn is sits for a worker that ends when the test kills it: the trainer closes the sockets of an attempt when
// its processes have ended, and so may cut off a reply to the test.
var sitsOn = role("sits on", func(ctx context.Context, _ []string) error {
	signal.Ignore(syscall.SIGTERM)
	emit("socket %s %s %d", os.Getenv(client.EnvSocket), os.Getenv(client.EnvToken), os.Getpid())
	<-ctx.Done()
	return ctx.Err()
})

// door is the socket of one rank.
type door struct {
	t      *testing.T
	token  string
	pid    int // of the worker whose it is
	socket string
	http   http.Client
}

// doors starts a job of workers that sit, and opens their sockets.
func doors(t *testing.T, nproc int) (*job, []*door) {
	t.Helper()
	return doorsOf(t, nproc, func(*job) {})
}

// doorsOf is doors for a job with another configuration.
func doorsOf(t *testing.T, nproc int, set func(*job)) (*job, []*door) {
	t.Helper()
	j := newJob(t, nproc, sits...)
	set(j)
	j.start()
	out := make([]*door, nproc)
	for rank := range out {
		prefix := ""
		if nproc > 1 {
			prefix = fmt.Sprintf("[rank%d] ", rank)
		}
		d := &door{t: t}
		if _, err := fmt.Sscan(j.out.await(t, 1, prefix+"socket ")[0], &d.socket, &d.token, &d.pid); err != nil {
			t.Fatal(err)
		}
		d.http.Transport = &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", d.socket)
		}}
		out[rank] = d
	}
	return j, out
}

// post sends a body and returns the reply's status and body, or 0 and why there is none.
func (d *door) post(op, body string, header ...string) (int, string) {
	return d.postUnder(d.t.Context(), op, body, header...)
}

// begin sends a body and returns when all of it is sent. The reply follows, as post has it.
func (d *door) begin(op, body string) <-chan string {
	sent, reply := make(chan struct{}), make(chan string, 1)
	once := sync.OnceFunc(func() { close(sent) })
	ctx := httptrace.WithClientTrace(d.t.Context(), &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { once() }})
	go func() {
		status, text := d.postUnder(ctx, op, body)
		reply <- fmt.Sprint(status, " ", text)
	}()
	select {
	case <-sent:
	case text := <-reply: // it could not be sent
		reply <- text
	}
	return reply
}

func (d *door) postUnder(ctx context.Context, op, body string, header ...string) (int, string) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://trainer/v1/"+op, strings.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	req.Header.Set("Authorization", "Bearer "+d.token)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := d.http.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	reply, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(reply)
}

const goodItem = `{"fqn":"w","dtype":"float32","shape":[2],"offsets":[0],"sizes":[2],"bytes":8}`

var badRequests = []struct {
	name   string
	op     string
	body   string
	header []string
	status int
	says   string
}{
	{"garbage", "save", `{"step":`, nil, 400, "decode request"},
	{"nothing", "hello", ``, nil, 400, "decode request"},
	{"wrong type", "save", `{"step":"one"}`, nil, 400, "decode request"},
	{"wrong token", "hello", `{"protocols":[3]}`, []string{"Authorization", "Bearer no"}, 401, "rank 0 of attempt 1: wrong token"},
	{"no token", "save", `{}`, []string{"Authorization", ""}, 401, "wrong token"},
	{"other protocol", "hello", `{"protocols":[0,7]}`, nil, 400, "protocol versions [0 7], this trainer speaks [3]"},
	{"no protocol", "hello", `{}`, nil, 400, "this trainer speaks [3]"},
	{"unknown request", "restore", `{}`, nil, 404, `no request "restore"`},

	{"negative step", "save", `{"step":-1}`, nil, 400, "step -1 is negative"},
	{"reference as name", "save", `{"step":1,"name":"run@x"}`, nil, 400, `"run@x"`},
	{"path as name", "save", `{"step":1,"name":"../x"}`, nil, 400, `"../x"`},
	{"reserved name", "save", `{"step":1,"name":"latest"}`, nil, 400, "latest"},
	{"long name", "save", `{"step":1,"name":"` + strings.Repeat("n", 65) + `"}`, nil, 400, "65 bytes"},
	{"no such rank", "save", `{"step":1,"participants":[0,2]}`, nil, 400, "a world of 2"},
	{"negative rank", "save", `{"step":1,"participants":[-1,0]}`, nil, 400, "a world of 2"},
	{"rank named twice", "save", `{"step":1,"participants":[0,0]}`, nil, 400, "distinct"},
	{"not a participant", "save", `{"step":1,"participants":[1]}`, nil, 400, "rank 0 takes part without being one"},
	{"duplicate item", "save", `{"step":1,"items":[` + goodItem + `,` + goodItem + `]}`, nil, 400, `"w" is saved twice`},
	{"duplicate value", "save", `{"step":1,"items":[{"fqn":"v","value":true},{"fqn":"v","value":true}]}`, nil, 400, `"v" is saved twice`},
	{"nameless item", "save", `{"step":1,"items":[{"value":true}]}`, nil, 400, "no name"},
	{"wrong bytes", "save", `{"step":1,"items":[` + strings.Replace(goodItem, ":8}", ":7}", 1) + `]}`, nil, 400, `"w" has 7 bytes`},
	{"negative bytes", "save", `{"step":1,"items":[{"fqn":"v","value":true,"bytes":-1}]}`, nil, 400, "-1 bytes"},
	{"unknown dtype", "save", `{"step":1,"items":[` + strings.Replace(goodItem, "float32", "float3", 1) + `]}`, nil, 400, "float3"},
	{"box outside", "save", `{"step":1,"items":[` + strings.Replace(goodItem, `"offsets":[0]`, `"offsets":[1]`, 1) + `]}`, nil, 400, `"w"`},
	{"overflowing shape", "save", `{"step":1,"items":[{"fqn":"w","dtype":"float32","shape":[4611686018427387904,4],"offsets":[0,0],"sizes":[1,1],"bytes":4}]}`, nil, 400, `"w"`},
	{"tensor per rank", "save", `{"step":1,"items":[{"per_rank":true,` + goodItem[1:] + `]}`, nil, 400, "cannot be per rank"},

	{"seal of nothing", "seal", `{"checkpoint":"step-1.a1"}`, nil, 409, `rank 0 has no staging slot for "step-1.a1"`},
	{"wait for no state", "wait", `{"checkpoint":"step-1.a1","state":"done"}`, nil, 400, `"done"`},
	{"load without a name", "load", `{"ref":"x","items":[{"value":true}]}`, nil, 400, "no name"},

	{"nested metric", "report", `{"metrics":{"loss":[1]}}`, nil, 400, `metric "loss"`},
	{"misspelt number", "report", `{"metrics":{"loss":NaNa}}`, nil, 400, "decode request"},

	{"gather without number", "gather", ``, nil, 400, client.HeaderSeq},
	{"broadcast without root", "broadcast", ``, []string{client.HeaderSeq, "1"}, 400, client.HeaderRoot},
	{"broadcast from no rank", "broadcast", ``, []string{client.HeaderSeq, "1", client.HeaderRoot, "2"}, 400, "a rank below 2"},
	{"broadcast of another size", "broadcast", `abc`, []string{client.HeaderSeq, "1", client.HeaderRoot, "0", client.HeaderSize, "4"}, 400, client.HeaderSize},
}

// A wrong request changes nothing and gets the reason.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	j, ranks := doors(t, 2)
	before := len(logOf(t, runOf(t)))
	for _, bad := range badRequests {
		status, reply := ranks[0].post(bad.op, bad.body, bad.header...)
		var p client.Problem
		if err := json.Unmarshal([]byte(reply), &p); err != nil {
			t.Errorf("%s: reply %q: %v", bad.name, reply, err)
		}
		if status != bad.status || !strings.Contains(p.Message, bad.says) {
			t.Errorf("%s: status %d, %q; want %d, %q", bad.name, status, p.Message, bad.status, bad.says)
		}
	}
	// Each socket has its own token.
	if status, _ := ranks[1].post("hello", `{"protocols":[3]}`, "Authorization", "Bearer "+ranks[0].token); status != 401 {
		t.Errorf("rank 1's socket took rank 0's token: status %d", status)
	}
	if info, err := os.Stat(ranks[0].socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the socket: %v, %v", info.Mode(), err)
	}
	if after := len(logOf(t, runOf(t))); after != before {
		t.Errorf("%d events were appended", after-before)
	}
	if files := slots(t, j); len(files) > 0 {
		t.Errorf("staging slots were made: %q", files)
	}
}

// mark stores the generation of a save in its slot, as a worker does after its copy.
func mark(t *testing.T, s client.SaveReply) {
	t.Helper()
	slot, err := os.OpenFile(s.Arena, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = slot.WriteAt(binary.LittleEndian.AppendUint64(nil, s.Generation), 8)
	if err := errors.Join(err, slot.Close()); err != nil {
		t.Fatal(err)
	}
}

// A slot belongs to the save that took it, until its bytes are written.
func TestSealOnce(t *testing.T) {
	t.Parallel()
	_, ranks := doors(t, 1)
	if status, reply := ranks[0].post("hello", `{"protocols":[3,99]}`); status != 200 || !strings.Contains(reply, `"protocol":3`) {
		t.Fatal(status, reply)
	}
	body := `{"step":1,"items":[` + goodItem + `]}`
	status, reply := ranks[0].post("save", body)
	var s client.SaveReply
	if err := json.Unmarshal([]byte(reply), &s); status != 200 || err != nil {
		t.Fatal(status, reply, err)
	}
	if data, err := os.ReadFile(s.Arena); err != nil || !bytes.HasPrefix(data[s.Offsets[0]:], make([]byte, 8)) {
		t.Fatalf("%d bytes, %v", len(data), err)
	}
	mark(t, s)
	if status, reply := ranks[0].post("seal", `{"checkpoint":"step-2.a1"}`); status != 409 {
		t.Fatal(status, reply)
	}
	if status, reply := ranks[0].post("seal", `{"checkpoint":"step-1.a1"}`); status != 200 {
		t.Fatal(status, reply)
	}
	if status, reply := ranks[0].post("wait", `{"checkpoint":"step-1.a1","state":"committed"}`); status != 200 || reply != `{"state":"committed"}` {
		t.Fatal(status, reply)
	}
	if status, reply := ranks[0].post("seal", `{"checkpoint":"step-1.a1"}`); status != 409 {
		t.Fatalf("an abandoned slot was sealed again: %d %s", status, reply)
	}
}

// A worker that reports its copy as complete, but has not marked the slot, is
// rejected: after the trainer's death, readers of the slot rely on the mark.
func TestSealWithoutMark(t *testing.T) {
	t.Parallel()
	_, ranks := doors(t, 1)
	if status, reply := ranks[0].post("hello", `{"protocols":[3]}`); status != 200 {
		t.Fatal(status, reply)
	}
	if status, reply := ranks[0].post("save", `{"step":1,"items":[`+goodItem+`]}`); status != 200 {
		t.Fatal(status, reply)
	}
	status, reply := ranks[0].post("seal", `{"checkpoint":"step-1.a1"}`)
	if status != 400 || !strings.Contains(reply, "is not sealed: bytes 8 to 16") {
		t.Errorf("%d %s", status, reply)
	}
	if sealed := bodiesOf[events.WriteSealed](t, runOf(t)); len(sealed) > 0 {
		t.Errorf("the log has %+v", sealed[0])
	}
}
