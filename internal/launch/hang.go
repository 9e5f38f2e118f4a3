package launch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/stacks"
	"github.com/ckptstore/ckptstore/internal/rpc"
	"github.com/ckptstore/ckptstore/internal/session/pulse"
)

// Bounds of the account of a hang.
const (
	accountTimeout = 30 * time.Second // until it is complete
	accountsAtOnce = 4                // ranks
	causeLines     = 12               // of the first silent rank's, in the cause of the failure
	causeBytes     = 2 << 10
	looksPerLimit  = 10 // checks for silent ranks per hang timeout
	longestLook    = time.Second
)

// watchHangs checks for ranks that are silent for the hang timeout, from now
// until stop. It then records the stacks of all ranks and sends the cause on
// hung, once.
func (w *watch) watchHangs(work context.Context) (stop func()) {
	limit := w.cfg.HangTimeout
	if limit <= 0 {
		return func() {}
	}
	w.hung = make(chan string, 1)
	ctx, cancel := context.WithCancel(work)
	w.unwatch = cancel
	done := make(chan struct{})
	go func() {
		defer close(done)
		silent, waiting := w.awaitSilence(ctx, limit, time.Now())
		if len(silent) == 0 {
			return
		}
		why := hangCause(silent, waiting)
		w.log.Warn("rank hangs; ending the group", "cause", why, "hang_timeout", limit)
		if text := w.account(ctx, silent); text != "" {
			why += "\n" + text
		}
		w.hung <- why
	}()
	return func() {
		cancel()
		<-done
	}
}

// endsHangs stops the detection of hangs, because the group is being ended.
func (w *watch) endsHangs() {
	if w.unwatch != nil {
		w.unwatch()
	}
}

// awaitSilence waits until some ranks are silent. It returns none when ctx ends.
// looked is the last time at which this process was known to run.
func (w *watch) awaitSilence(ctx context.Context, limit time.Duration, looked time.Time) ([]pulse.Silence, []int) {
	every := min(limit/looksPerLimit+1, longestLook)
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	local := w.cfg.Local() // a coordinating process sees requests of other ranks too
	lives := func(rank int) bool { return slices.Contains(local, rank) && !w.proc(rank).Ended() }
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil, nil
		}
		now := time.Now()
		if late := now.Sub(looked) - every; late > limit/2 {
			w.log.Warn("trainer was suspended; the pause does not count as silence of the ranks", "late", late)
			w.pulses.Shift(late)
		}
		looked = now
		if silent, waiting := w.pulses.Silent(limit, now, lives); len(silent) > 0 {
			return silent, waiting
		}
	}
}

// hangCause names the silent ranks and the ranks that wait for them.
func hangCause(silent []pulse.Silence, waiting []int) string {
	var parts []string
	for _, s := range silent {
		parts = append(parts, fmt.Sprintf("rank %d silent for %v, last request %s", s.Rank, s.Took.Round(100*time.Millisecond), s.Last))
	}
	cause := strings.Join(parts, "; ")
	if len(waiting) == 0 {
		return cause
	}
	var ranks []string
	for _, rank := range waiting {
		ranks = append(ranks, strconv.Itoa(rank))
	}
	who, whom := "ranks "+strings.Join(ranks, ", ")+" wait", "it"
	if len(waiting) == 1 {
		who = "rank " + ranks[0] + " waits"
	}
	if len(silent) > 1 {
		whom = "them"
	}
	return cause + "; " + who + " for " + whom
}

// account writes the stacks of each rank to the job's output, the silent ranks
// first. It returns the beginning of the first rank's stacks.
func (w *watch) account(ctx context.Context, silent []pulse.Silence) string {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	w.signals.stacks.Store(true) // the group is ended after this in any case
	var order []int
	title := map[int]string{}
	for _, s := range silent {
		order = append(order, s.Rank)
		title[s.Rank] = "silent"
	}
	for _, rank := range w.cfg.Local() {
		if title[rank] == "" {
			title[rank] = "not silent"
			order = append(order, rank)
		}
	}
	texts := make([]string, len(order))
	slots := make(chan struct{}, accountsAtOnce)
	var all sync.WaitGroup
	for i, rank := range order {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			texts[i] = w.stacksOf(ctx, rank)
		})
	}
	all.Wait()
	for i, rank := range order {
		prefix := fmt.Sprintf("[rank%d] ", rank)
		var b strings.Builder
		fmt.Fprintf(&b, "%sstacks of rank %d, which is %s:\n", prefix, rank, title[rank])
		for line := range strings.Lines(texts[i]) {
			b.WriteString(prefix + strings.TrimSuffix(line, "\n") + "\n")
		}
		// A closed terminal must not prevent the end of the group.
		_, _ = w.cfg.Stderr.Write([]byte(b.String()))
	}
	return firstLines(texts[0])
}

func firstLines(text string) string {
	var b strings.Builder
	n := 0
	for line := range strings.Lines(text) {
		if n++; n > causeLines || b.Len()+len(line) > causeBytes {
			b.WriteString("…: the rest is in the job's output")
			return b.String()
		}
		b.WriteString(line)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// stacksOf returns the stacks of a rank, or why they are unavailable.
func (w *watch) stacksOf(ctx context.Context, rank int) string {
	p := w.proc(rank)
	if p.Ended() {
		return "its process has ended\n"
	}
	target := stacks.Target{PID: p.PID()}
	if _, err := os.Stat(w.group.File(rank, rpcSocket)); !errors.Is(err, fs.ErrNotExist) {
		target.Ask = func(ctx context.Context) (string, error) { return w.askStacks(ctx, rank) }
	}
	text, how, err := stacks.Collect(ctx, target)
	if err != nil {
		text += fmt.Sprintf("%v\n", err)
	}
	return "by " + how + ":\n" + text
}

// mostStacks bounds the size of a worker's answer, in bytes. The Go client's
// answer has 4 MiB at most.
const mostStacks = 8 << 20

// rpcSocket is the suffix of the socket on which a worker may serve calls.
const rpcSocket = "rpc"

// askStacks requests the stacks from the worker itself.
func (w *watch) askStacks(ctx context.Context, rank int) (text string, err error) {
	trainer, err := rpc.NewPipe(rpc.PipeConfig{
		Self: rpc.Peer{Name: client.TrainerAgent, Rank: rpc.AnyRank}, Token: w.tokens[rank],
		Options: &rpc.TensorPipeOptions{Common: rpc.Common{MaxBytes: mostStacks}},
	})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, trainer.Close()) }()
	there := rpc.Peer{Name: client.AgentName(rank), Rank: rank}
	if err := trainer.Add(rpc.Endpoint{Peer: there, Network: "unix", Address: w.group.File(rank, rpcSocket)}); err != nil {
		return "", err
	}
	body, err := trainer.Call(ctx, there.Name, client.FunctionStacks, nil)
	return string(body), err
}
