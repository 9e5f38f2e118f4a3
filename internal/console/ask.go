package console

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNoTerminal means that the command cannot ask the user: it has no terminal.
var ErrNoTerminal = errors.New("there is no terminal to ask on")

// askTimeout is how long a question waits for its answer.
const askTimeout = 5 * time.Minute

// Ask asks a yes/no question on the terminal. Both standard input and standard
// error must be the terminal: otherwise the answer may be to a question that the
// user did not see.
func (c *Console) Ask(ctx context.Context, question string) (yes bool, err error) {
	screen, ok := c.Screen.(*os.File)
	if !ok || !OnTerminal(screen) || !OnTerminal(os.Stdin) {
		return false, ErrNoTerminal
	}
	// Input typed before the question does not answer it.
	if err := unix.IoctlSetInt(int(os.Stdin.Fd()), unix.TCFLSH, unix.TCIFLUSH); err != nil {
		return false, fmt.Errorf("ask on the terminal: %w", err)
	}
	fmt.Fprint(screen, question)
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answers := make(chan string, 1)
	go func() { // without an answer it ends with the process
		line := make([]byte, 64)
		n, _ := os.Stdin.Read(line) // at most one line; n is 0 on an error
		answers <- strings.TrimSpace(string(line[:n]))
	}()
	select {
	case answer := <-answers:
		return strings.EqualFold(answer, "y") || strings.EqualFold(answer, "yes"), nil
	case <-ctx.Done():
		fmt.Fprintln(screen)
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return false, fmt.Errorf("no answer within %v", askTimeout)
		}
		return false, ctx.Err()
	}
}

// OnTerminal reports whether a stream is a terminal.
func OnTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Colours reports whether a stream is a terminal whose user wants colours.
func Colours(stream any) bool {
	return OnTerminal(stream) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
