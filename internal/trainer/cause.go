package trainer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/ckptstore/ckptstore/internal/container"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/terminal"
)

// leaveCause leaves the error that ended a job where Kubernetes shows it, with the last
// output of the rank that failed. All who may see the pod read it: it has no secrets that
// redact knows.
func leaveCause(stderr io.Writer, err error) {
	output := ""
	var failed *launch.FailedError
	if errors.As(err, &failed) && len(failed.Tail) > 0 {
		lines := terminal.AppendOutput(nil, []byte(strings.Join(failed.Tail, "")))
		output = fmt.Sprintf("last output of rank %d:\n%s", failed.Rank, redact.Text(string(lines)))
	}
	text := redact.Text(terminal.Text("trainer: " + err.Error()))
	if lerr := container.LeaveCause(os.Getenv, text, output); lerr != nil {
		fmt.Fprintln(stderr, "trainer:", lerr)
	}
}

// causeWriter leaves what is written to it as the cause of the end. It is for the
// message of a program that exits because it is stuck.
type causeWriter struct{}

// Write implements io.Writer.
func (causeWriter) Write(p []byte) (int, error) {
	return len(p), container.LeaveCause(os.Getenv, redact.Text(string(p)), "")
}
