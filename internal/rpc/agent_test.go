package rpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func echo(_ context.Context, body []byte) ([]byte, error) { return body, nil }

// Bodies of any size come back unchanged, many at once, in both directions.
func TestRoundTrip(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		agents := open(t, backend, 3, nil)
		for _, a := range agents {
			handle(t, a, "echo", echo)
		}
		rapid.Check(t, func(rt *rapid.T) {
			sizes := rapid.SliceOfN(rapid.OneOf(rapid.IntRange(0, 100), rapid.IntRange(bulk-2, bulk+2), rapid.IntRange(0, 1<<20)), 1, 12).Draw(rt, "sizes")
			errs := make([]error, len(sizes))
			var all sync.WaitGroup
			for i, size := range sizes {
				from, to := agents[i%3], agents[rapid.IntRange(0, 2).Draw(rt, "to")]
				body := bytes.Repeat([]byte{byte(i), byte(size)}, size/2+1)[:size]
				all.Go(func() {
					got, err := from.Call(t.Context(), to.Self().Name, "echo", body)
					if err == nil && !bytes.Equal(got, body) {
						err = fmt.Errorf("%d bytes came back as %d others", len(body), len(got))
					}
					errs[i] = err
				})
			}
			all.Wait()
			if err := errors.Join(errs...); err != nil {
				rt.Fatal(err)
			}
		})
	})
}

func TestTypedCall(t *testing.T) {
	agents := open(t, TensorPipe, 2, nil)
	type pair struct{ A, B int }
	if err := Handle(agents[1], "sum", func(_ context.Context, p pair) (int, error) { return p.A + p.B, nil }); err != nil {
		t.Fatal(err)
	}
	got, err := Call[pair, int](t.Context(), agents[0], "worker1", "sum", pair{2, 3})
	if err != nil || got != 5 {
		t.Errorf("%d, %v", got, err)
	}
	_, err = Call[string, int](t.Context(), agents[0], "worker1", "sum", "two")
	wantError(t, err, "sum on worker1 (rank 1): decode the argument")
}

// An error names the function and the peer that returned it.
func TestRemoteErrors(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		agents := open(t, backend, 2, nil)
		handle(t, agents[1], "fails", func(context.Context, []byte) ([]byte, error) { return nil, errors.New("no luck") })
		handle(t, agents[1], "panics", func(context.Context, []byte) ([]byte, error) { panic("no sense") })
		remote := func(a Agent, function string, parts ...string) {
			t.Helper()
			_, err := a.Call(t.Context(), "worker1", function, nil)
			wantError(t, err, parts...)
			if e := (*RemoteError)(nil); !errors.As(err, &e) || e.Peer.Rank != 1 {
				t.Errorf("%T %v", err, err)
			}
		}
		for _, a := range agents { // a call to oneself works like any other
			remote(a, "fails", "fails on worker1 (rank 1): no luck")
			remote(a, "panics", "panics on worker1 (rank 1): it panicked: no sense", "agent_test.go")
			remote(a, "unknown", `no function "unknown" is registered here`)
		}
		_, err := agents[0].Call(t.Context(), "worker7", "fails", nil)
		wantError(t, err, "call fails of worker7: no such peer")
		if !errors.Is(err, ErrUnknownPeer) {
			t.Errorf("%v", err)
		}
		wantError(t, agents[0].Handle("", echo), "a name has 1 to")
		wantError(t, agents[1].Handle("fails", echo), "already registered")
	})
}

// The caller's deadline and its end reach the callee.
func TestDeadlineTravels(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		agents := open(t, backend, 2, nil)
		left := make(chan time.Duration, 1)
		handle(t, agents[1], "left", func(ctx context.Context, _ []byte) ([]byte, error) {
			at, ok := ctx.Deadline()
			if !ok {
				at = time.Now()
			}
			left <- time.Until(at)
			return nil, nil
		})
		ended := make(chan error, 1)
		handle(t, agents[1], "hangs", func(ctx context.Context, _ []byte) ([]byte, error) {
			<-ctx.Done()
			ended <- ctx.Err()
			return nil, ctx.Err()
		})
		ctx, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		if _, err := agents[0].Call(ctx, "worker1", "left", nil); err != nil {
			t.Fatal(err)
		}
		if d := within(t, left, "the call"); d <= 0 || d > patience {
			t.Errorf("%v are left of %v", d, patience)
		}
		ctx, stop = context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer stop()
		_, err := agents[0].Call(ctx, "worker1", "hangs", nil)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		wantError(t, err, "hangs", "worker1 (rank 1)")
	})
}

// A call without a deadline gets the options' timeout.
func TestDefaultTimeout(t *testing.T) {
	agents := open(t, TensorPipe, 2, func(_ int, s *Setup) {
		o := DefaultTensorPipe()
		o.Timeout = 50 * time.Millisecond
		s.Options = o
	})
	handle(t, agents[1], "hangs", func(ctx context.Context, _ []byte) ([]byte, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	if _, err := agents[0].Call(t.Context(), "worker1", "hangs", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// A caller that gives up ends the callee's context, whose deadline is far.
func TestCancellationTravels(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		for _, size := range []int{0, 4 * bulk} {
			agents := open(t, backend, 2, nil)
			began, ended := make(chan bool, 1), make(chan error, 1)
			handle(t, agents[1], "hangs", func(ctx context.Context, _ []byte) ([]byte, error) {
				began <- true
				<-ctx.Done()
				ended <- ctx.Err()
				return nil, ctx.Err()
			})
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				<-began
				cancel()
			}()
			_, err := agents[0].Call(ctx, "worker1", "hangs", make([]byte, size))
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error %v", err)
			}
			if err := within(t, ended, "the end of the function"); !errors.Is(err, context.Canceled) {
				t.Errorf("the function's context ended with %v", err)
			}
		}
	})
}

// A large body that the peer does not read does not hold up small calls.
func TestSmallCallsPassLargeOnes(t *testing.T) {
	p, err := NewPipe(PipeConfig{Self: Peer{"here", AnyRank}, Token: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	small, farSmall := net.Pipe()
	large, farLarge := net.Pipe()
	l := p.connect(Peer{"there", 1}, []net.Conn{small, large}).link
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stuck := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := l.call(ctx, "large", make([]byte, 1<<20))
			stuck <- err
		}()
	}
	// The peer has seen the beginning of one of them and reads no further.
	if _, err := io.ReadFull(farLarge, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := l.call(ctx, "small", nil)
		answered <- err
	}()
	f, err := readFrame(farSmall, 1<<21)
	if err != nil || f.function != "small" {
		t.Fatalf("call %q, %v came first", f.function, err)
	}
	if _, err := farSmall.Write(frame{kind: kindReply, id: f.id}.encode()); err != nil {
		t.Fatal(err)
	}
	if err := within(t, answered, "the small call's answer"); err != nil {
		t.Error(err)
	}
	cancel()
	for range 2 {
		if err := within(t, stuck, "the end of a large call"); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	}
}

// pipes returns two agents on unix sockets that know each other.
func pipes(t *testing.T) (here, there *Pipe) {
	t.Helper()
	make := func(name string) *Pipe {
		p, err := NewPipe(PipeConfig{Self: Peer{name, AnyRank}, Network: "unix", Address: filepath.Join(t.TempDir(), "s"), Token: "secret"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := p.Close(); err != nil {
				t.Errorf("close %s: %v", name, err)
			}
		})
		return p
	}
	here, there = make("here"), make("there")
	if err := errors.Join(here.Add(there.Endpoint()), there.Add(here.Endpoint())); err != nil {
		t.Fatal(err)
	}
	return here, there
}

// A process without the token is refused, on both sides.
func TestToken(t *testing.T) {
	_, there := pipes(t)
	handle(t, there, "echo", echo)
	stranger, err := NewPipe(PipeConfig{Self: Peer{"stranger", AnyRank}, Token: "guess"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stranger.Close() }()
	if err := stranger.Add(there.Endpoint()); err != nil {
		t.Fatal(err)
	}
	_, err = stranger.Call(t.Context(), "there", "echo", nil)
	if !errors.Is(err, errToken) {
		t.Errorf("error %v", err)
	}
	// A caller that ignores the listener's proof is refused anyway.
	c, err := net.Dial("unix", there.Endpoint().Address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	g := greeting{Version: version, Peer: Peer{"x", 1}, Session: "s", Of: 1, Nonce: nonce()}
	if err := sendGreeting(c, g); err != nil {
		t.Fatal(err)
	}
	l, err := readGreeting(c)
	if err != nil {
		t.Fatal(err)
	}
	g.Proof = l.Proof // the other side's own message is no proof
	if err := sendGreeting(c, g); err != nil {
		t.Fatal(err)
	}
	_, err = readGreeting(c)
	wantError(t, err, "the token is wrong")
	if _, err := NewPipe(PipeConfig{Self: Peer{"open", 0}}); err == nil {
		t.Error("an agent without a token was opened")
	}
	if _, err := NewPipe(PipeConfig{Self: Peer{"open", 0}, Token: "t", Network: "tcp", Address: "0.0.0.0:0"}); err == nil {
		t.Error("an agent listens to the world")
	}
}

// A frame that announces a huge size is refused before memory is allocated for
// it, from strangers and from peers.
func TestFramesAreBounded(t *testing.T) {
	huge := binary.LittleEndian.AppendUint32(nil, 1<<32-1)
	for _, limit := range []int{10, 1 << 20} {
		_, err := readFrame(bytes.NewReader(huge), limit)
		wantError(t, err, "larger than the limit")
	}
	_, there := pipes(t)
	c, err := net.Dial("unix", there.Endpoint().Address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Write(huge); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "reset") {
		t.Errorf("the connection is kept: %v", err)
	}
	agents := open(t, TensorPipe, 2, func(_ int, s *Setup) {
		o := DefaultTensorPipe()
		o.MaxBytes = 1000
		s.Options = o
	})
	handle(t, agents[1], "grow", func(_ context.Context, b []byte) ([]byte, error) { return make([]byte, 2*len(b)), nil })
	_, err = agents[0].Call(t.Context(), "worker1", "grow", make([]byte, 1001))
	wantError(t, err, "argument of 1001 bytes")
	_, err = agents[0].Call(t.Context(), "worker1", "grow", make([]byte, 501))
	wantError(t, err, "result of 1002 bytes")
	if got, err := agents[0].Call(t.Context(), "worker1", "grow", make([]byte, 500)); err != nil || len(got) != 1000 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func FuzzFrame(f *testing.F) {
	f.Add(frame{kind: kindCall, id: 7, left: time.Second, function: "f", body: []byte("x")}.encode()[4:])
	f.Add([]byte{1, 2})
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := decodeFrame(data)
		if err == nil && got.left < 0 {
			t.Errorf("%s is %+v", hex.EncodeToString(data), got)
		}
	})
}

const asPeer = "as-peer"

// bePeer is a process whose function never returns.
func bePeer(socket string) error {
	p, err := NewPipe(PipeConfig{Self: Peer{"victim", 3}, Network: "unix", Address: socket, Token: "secret"})
	if err != nil {
		return err
	}
	err = p.Handle("hangs", func(ctx context.Context, _ []byte) ([]byte, error) {
		fmt.Println("called")
		<-ctx.Done()
		return nil, ctx.Err()
	})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin) // until the test has ended
	return errors.Join(err, p.Close())
}

// Calls to a killed process fail at once and name it; their deadline is far.
func TestPeerIsKilled(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	victim := exec.Command("/proc/self/exe", asPeer, socket)
	in, err := victim.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := victim.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	victim.Stderr = os.Stderr
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = victim.Process.Kill(), victim.Wait() }()
	defer func() { _ = in.Close() }()
	buf := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(out, buf); err != nil {
		t.Fatal(err)
	}
	here, err := NewPipe(PipeConfig{Self: Peer{"here", AnyRank}, Token: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = here.Close() }()
	if err := here.Add(Endpoint{Peer{"victim", 3}, "unix", socket}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 10*patience)
	defer stop()
	failed := make(chan error, 1)
	go func() {
		_, err := here.Call(ctx, "victim", "hangs", nil)
		failed <- err
	}()
	if _, err := io.ReadFull(out, make([]byte, len("called\n"))); err != nil {
		t.Fatal(err)
	}
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	err = within(t, failed, "the call's end")
	wantError(t, err, "call hangs of victim (rank 3)")
	if !errors.Is(err, ErrGone) {
		t.Errorf("error %v", err)
	}
	_, err = here.Call(ctx, "victim", "hangs", nil)
	if e := (*PeerError)(nil); !errors.As(err, &e) || e.Peer.Rank != 3 || !errors.Is(err, ErrGone) {
		t.Errorf("error %v", err)
	}
}

// A peer that closes ends the calls to it, and its own calls' functions.
func TestPeerCloses(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		agents := open(t, backend, 3, nil)
		began, ended := make(chan int, 2), make(chan int, 2)
		for rank, a := range agents[1:] {
			handle(t, a, "hangs", func(ctx context.Context, _ []byte) ([]byte, error) {
				began <- rank
				<-ctx.Done()
				ended <- rank
				return nil, ctx.Err()
			})
		}
		failed := make(chan error, 2)
		for caller, to := range []string{"worker1", "worker2"} {
			go func() {
				_, err := agents[caller].Call(t.Context(), to, "hangs", nil)
				failed <- err
			}()
		}
		within(t, began, "a call")
		within(t, began, "a call")
		if err := agents[1].Close(); err != nil { // called by 0, calls 2
			t.Fatal(err)
		}
		for range 2 {
			err := within(t, failed, "a call's end")
			if !errors.Is(err, ErrGone) && !errors.Is(err, ErrClosed) && !errors.Is(err, context.Canceled) {
				t.Errorf("error %v", err)
			}
		}
		within(t, ended, "a function's end")
		within(t, ended, "a function's end")
		_, err := agents[1].Call(t.Context(), "worker2", "hangs", nil)
		if !errors.Is(err, ErrClosed) {
			t.Errorf("error %v", err)
		}
	})
}

// Shutdown waits for all calls among the ranks, including those that functions
// make.
func TestShutdown(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		const ranks, hops = 3, 9
		agents := open(t, backend, ranks, nil)
		arrived := make(chan int, 1)
		for rank, a := range agents {
			handle(t, a, "hop", func(ctx context.Context, body []byte) ([]byte, error) {
				var left int
				if err := json.Unmarshal(body, &left); err != nil {
					return nil, err
				}
				if left == 0 {
					arrived <- rank
					return nil, nil
				}
				next, _ := json.Marshal(left - 1)
				return a.Call(ctx, fmt.Sprint("worker", (rank+1)%ranks), "hop", next)
			})
		}
		began := make(chan error, 1)
		go func() {
			_, err := agents[0].Call(t.Context(), "worker1", "hop", fmt.Append(nil, hops))
			began <- err
		}()
		var all sync.WaitGroup
		ctx, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		all.Go(func() {
			if err := <-began; err != nil {
				t.Errorf("the call was cut: %v", err)
			}
			if err := agents[0].Shutdown(ctx); err != nil {
				t.Error(err)
			}
		})
		for _, a := range agents[1:] {
			all.Go(func() {
				if err := a.Shutdown(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		within(t, arrived, "the last hop")
	})
}

// A call made after a rank had begun to shut down, by a function that has
// returned already, is not cut either.
func TestShutdownMeetsTwice(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		// Opening takes two meetings, and so does each round of a shutdown.
		const first, second = 3, 5
		come, again := make(chan int, 3), make(chan int, 3)
		agents, errs := worldThatMeets(t, backend, 3, nil, func(rank int, seq uint64) {
			switch seq {
			case first:
				come <- rank
			case second:
				again <- rank
			}
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		began, release, late := make(chan bool, 1), make(chan bool), make(chan error, 1)
		handle(t, agents[2], "slow", func(ctx context.Context, _ []byte) ([]byte, error) {
			began <- true
			select {
			case <-release:
				return nil, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		})
		handle(t, agents[1], "later", func(context.Context, []byte) ([]byte, error) {
			go func() {
				_, err := agents[1].Call(t.Context(), "worker2", "slow", nil)
				late <- err
			}()
			return nil, nil
		})
		ctx, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		down := make(chan error, 3)
		shut := func(a Agent) { down <- a.Shutdown(ctx) }
		go shut(agents[1])
		go shut(agents[2])
		within(t, come, "the first rank")
		within(t, come, "the second rank")
		if _, err := agents[0].Call(ctx, "worker1", "later", nil); err != nil {
			t.Fatal(err)
		}
		within(t, began, "the late call")
		go shut(agents[0])
		left := 3
		select {
		case <-again: // rank 0 has no running call: it comes again first
		case err := <-down:
			t.Errorf("a rank has shut down while a call was under way: %v", err)
			left--
		}
		close(release)
		for range left {
			if err := within(t, down, "a shutdown"); err != nil {
				t.Error(err)
			}
		}
		if err := within(t, late, "the late call's end"); err != nil {
			t.Errorf("the late call was cut: %v", err)
		}
	})
}
