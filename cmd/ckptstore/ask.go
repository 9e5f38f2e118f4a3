package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// errNoTerminal says that no person can be asked.
var errNoTerminal = errors.New("there is no terminal to ask on")

// askTimeout is how long a question waits for its answer.
const askTimeout = 5 * time.Minute

// ask asks for a yes on the terminal. Standard input and standard error must both
// be it: otherwise the answer may be to a question that was not seen.
func (c *console) ask(ctx context.Context, question string) (yes bool, err error) {
	screen, ok := c.screen.(*os.File)
	if !ok || !onTerminal(screen) || !onTerminal(os.Stdin) {
		return false, errNoTerminal
	}
	// What was typed before the question is no answer to it.
	if err := unix.IoctlSetInt(int(os.Stdin.Fd()), unix.TCFLSH, unix.TCIFLUSH); err != nil {
		return false, fmt.Errorf("ask on the terminal: %w", err)
	}
	fmt.Fprint(screen, question)
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answers := make(chan string, 1)
	go func() { // without an answer it ends with the process
		line := make([]byte, 64)
		n, _ := os.Stdin.Read(line) // at most one line; of an error, none
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

// onTerminal reports whether a stream is a terminal.
func onTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// colours reports whether a stream is a terminal whose user wants colours.
func colours(stream any) bool {
	return onTerminal(stream) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
