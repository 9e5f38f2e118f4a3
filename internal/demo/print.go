package demo

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/ckptstore/ckptstore/internal/console"
)

// progress is the demo's line on a terminal, or one line per phase elsewhere.
type progress struct {
	to       io.Writer
	terminal bool
	began    time.Time

	mu   sync.Mutex
	now  string
	quit chan struct{}
	done chan struct{}
	once sync.Once
}

func startProgress(to io.Writer) *progress {
	p := &progress{to: to, terminal: console.OnTerminal(to), began: time.Now(), quit: make(chan struct{}), done: make(chan struct{})}
	go p.draw()
	return p
}

func (p *progress) draw() {
	defer close(p.done)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-p.quit:
			return
		case <-tick.C:
			p.mu.Lock()
			if p.terminal && p.now != "" {
				fmt.Fprintf(p.to, "\r\x1b[K%5.1fs  %s", time.Since(p.began).Seconds(), p.now)
			}
			p.mu.Unlock()
		}
	}
}

// phase ends the line of the last phase and begins another.
func (p *progress) phase(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLine()
	p.now = fmt.Sprintf(format, args...)
	if !p.terminal {
		fmt.Fprintf(p.to, "%5.1fs  %s\n", time.Since(p.began).Seconds(), p.now)
	}
}

// note prints a separate line.
func (p *progress) note(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLine()
	p.now = ""
	fmt.Fprintf(p.to, format+"\n", args...)
}

func (p *progress) endLine() {
	if p.terminal && p.now != "" {
		fmt.Fprintf(p.to, "\r\x1b[K%5.1fs  %s\n", time.Since(p.began).Seconds(), p.now)
	}
}

func (p *progress) stop() {
	p.once.Do(func() {
		close(p.quit)
		<-p.done
		p.mu.Lock()
		defer p.mu.Unlock()
		p.endLine()
		p.now = ""
	})
}

// conclude prints the table of checkpoints, the results, and where to look.
func (d *demo) conclude(ctx context.Context, r result) error {
	w := tabwriter.NewWriter(d.std.Out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "RUN\tCHECKPOINT\tSTATE\tRANKS\tBYTES\tCONTINUES, OR WHY NOT")
	for _, run := range []string{reference, killed} {
		list, err := d.checkpoints(ctx, run)
		if err != nil {
			return err
		}
		for i := len(list) - 1; i >= 0; i-- {
			c := list[i]
			parent := c.Parent
			if c.Reason != "" {
				parent = c.Reason
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%s\n", run, c.ID, c.State, c.WorldSize, c.Bytes, parent)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	mark := map[bool]string{true: "yes", false: "NO"}
	_, err := fmt.Fprintf(d.std.Out, `
test accuracy                                   %.3f
killed run ends bitwise equal to the reference  %s
restored on 3 and 2 ranks bitwise equal         %s
views rebuilt from the log, same digest         %s
flipped bit found and named                     %s

Look around:
  go run ./cmd/ckptstore ls --store %[6]s --all
  go run ./cmd/ckptstore show killed@latest --store %[6]s
  go run ./cmd/ckptstore events killed --store %[6]s
  go run ./cmd/ckptstore verify --store %[6]s
`, r.Accuracy, mark[r.BitwiseEqual], mark[r.ReshardedEqual], mark[r.ReplayEqual], mark[r.CorruptionFound], d.storeDir())
	return err
}

// lastLines keeps the last output of the workers, for when they fail.
type lastLines struct {
	mu   sync.Mutex
	text []byte
}

// Write implements io.Writer.
func (l *lastLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, p...)
	const most = 4 << 10
	if over := len(l.text) - most; over > 0 {
		l.text = l.text[over:]
	}
	return len(p), nil
}

func (l *lastLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.TrimSpace(string(l.text))
}
