package store

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/query"
	"go.uber.org/goleak"
)

// play is the main function of another process.
func play(role string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	switch role {
	case "server":
		return serveLog(ctx)
	case "holder":
		return holdLog(ctx)
	case "disk":
		return fillDisk(ctx)
	case "disk again":
		return afterFull(ctx)
	case "cut":
		return cutAndDie(ctx)
	case "views":
		return breakViews(ctx)
	case "train":
		return train(ctx)
	case "audit":
		return auditVictim(ctx, os.Getenv("CKPTSTORE_TEST_AUDIT_STORE"), os.Getenv(envAuditKill))
	case "backup":
		return backupAndDie(ctx)
	case "sign":
		return signAndDie(ctx)
	case "recover":
		return recoverAndDie(ctx)
	case "actor":
		a := &actor{out: json.NewEncoder(os.Stdout), stop: make(chan struct{}), stopped: make(chan error, 1)}
		if err := a.run(ctx); err != nil {
			return err
		}
		cancel()
		return goleak.Find()
	}
	return fmt.Errorf("unknown role %q", role)
}

// holdLog runs a server over the log of a directory, without clients, until standard
// input ends.
func holdLog(ctx context.Context) error {
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: os.Getenv("CKPTSTORE_TEST_DIR")})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	if err := json.NewEncoder(os.Stdout).Encode(reply{}); err != nil {
		return err
	}
	return waitForEnd(ctx)
}

// waitForEnd returns when standard input ends.
func waitForEnd(ctx context.Context) error {
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		continue
	}
	return ctx.Err()
}

// serveLog runs a NATS server on TCP until standard input ends.
func serveLog(ctx context.Context) error {
	url, stop, err := natstest.Start(os.Getenv("CKPTSTORE_TEST_DIR"), natstest.Open)
	if err != nil {
		return err
	}
	defer stop()
	if err := json.NewEncoder(os.Stdout).Encode(reply{Text: url}); err != nil {
		return err
	}
	return waitForEnd(ctx)
}

// actor is a process that uses a store.
type actor struct {
	store   *Store
	held    context.Context
	release func() error

	stop    chan struct{}
	stopped chan error

	mu  sync.Mutex
	out *json.Encoder
}

func (a *actor) say(r reply) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.out.Encode(r)
}

func (a *actor) run(ctx context.Context) error {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return err
		}
		got, err := a.act(ctx, r)
		if err != nil {
			got = failed(err)
		}
		if err := a.say(got); err != nil {
			return err
		}
	}
	if a.store == nil {
		return lines.Err()
	}
	return errors.Join(lines.Err(), a.store.Close())
}

func (a *actor) act(ctx context.Context, r request) (got reply, err error) {
	switch r.Do {
	case "init":
		got.Text, err = Init(ctx, r.Location, r.Data)
	case "open":
		a.store, err = Open(ctx, Options{Location: r.Location, Patience: r.Patience})
		if err == nil {
			got.Text, a.store.term = a.store.ID, r.Term
		}
	case "owns":
		got.Text = fmt.Sprint(a.store.Owns())
	case "append":
		for i := range r.Count {
			if err := a.append(ctx, r.Run, fmt.Sprintf("%s-%d", r.Name, i), i+1); err != nil {
				return got, err
			}
		}
	case "hammer":
		go func() { a.stopped <- a.hammer(ctx, r.Run, r.Name) }()
	case "stop":
		close(a.stop)
		err = <-a.stopped
	case "begin": // a decision
		_, err = decide(ctx, a.store, r.Run, begun(r.Name))
	case "ids":
		ids, rerr := logged(ctx, a.store)
		if err = rerr; err == nil {
			got.Data, err = json.Marshal(ids)
		}
	case "ask":
		got.Data, err = a.store.Views().Answer(ctx, r.Name, query.Params{Run: r.Run, Trial: trialName, Attempt: 1, All: true})
	case "hold":
		a.held, a.release, err = a.store.HoldRun(ctx, r.Run, r.Name)
	case "held":
		got.Text = fmt.Sprint(a.held.Err() == nil)
	case "release":
		err = a.release()
	case "list": // without the lock
		got.Text, err = list(ctx, r.Location)
	case "become": // a user with fewer rights
		err = become(r.Count)
	default:
		err = fmt.Errorf("unknown request %q", r.Do)
	}
	return got, err
}

func list(ctx context.Context, location string) (ids string, err error) {
	root, err := OpenData(location)
	if err != nil {
		return "", err
	}
	receipts, _, err := root.Checkpoints(ctx)
	for _, r := range receipts {
		ids += r.Checkpoint
	}
	return ids, err
}

// append appends an event and reports it as stored as soon as the log acknowledges it.
func (a *actor) append(ctx context.Context, run, id string, iteration int) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	fact, err := metrics(id, run, iteration)
	if err != nil {
		return err
	}
	if _, err := a.store.Log.Append(ctx, fact); err != nil {
		return err
	}
	return a.say(reply{Acknowledged: id})
}

// settle makes a decision and retries while others come first.
func (a *actor) settle(ctx context.Context, run, id string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	agg := events.Aggregate{Run: run, Trial: trialName}
	d, err := events.NewDecision(events.Stamp{ID: id, Source: "test", Time: time.Now()}, agg, begun(id))
	if err != nil {
		return err
	}
	for {
		end, err := a.store.Log.LaneEnd(ctx, agg)
		if err != nil {
			return err
		}
		_, err = a.store.Log.Decide(ctx, d, end)
		switch {
		case err == nil:
			return a.say(reply{Acknowledged: id})
		case !errors.Is(err, jetlog.ErrConflict):
			return err
		}
	}
}

// hammer appends facts and makes decisions until standard input ends.
func (a *actor) hammer(ctx context.Context, run, prefix string) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for i := 1; ; i++ {
		if err := a.append(ctx, run, fmt.Sprintf("%s-%d", prefix, i), i); err != nil {
			return err
		}
		if i%3 == 0 {
			if err := a.settle(ctx, run, fmt.Sprintf("%s-d%d", prefix, i)); err != nil {
				return err
			}
		}
		select {
		case <-a.stop:
			return nil
		case <-tick.C:
		}
	}
}
