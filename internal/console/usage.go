package console

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// UsageError is a mistake in the command line.
type UsageError struct{ Err error }

// Error returns the message.
func (u UsageError) Error() string { return u.Err.Error() }

// ProblemKind returns [problem.Invalid].
func (UsageError) ProblemKind() problem.Kind { return problem.Invalid }

// Unwrap returns the cause.
func (u UsageError) Unwrap() error { return u.Err }

// Usagef returns a UsageError with a formatted message.
func Usagef(format string, values ...any) error {
	return UsageError{Err: fmt.Errorf(format, values...)}
}

// Program completes the root command of a program. It turns an unknown command or
// a wrong option into a UsageError, and leaves printing errors to the program.
func Program(root *cobra.Command, args []string, stdout, stderr io.Writer) {
	root.SilenceUsage, root.SilenceErrors = true, true
	// Without this, an unknown command would not be a usage error.
	root.Args = cobra.ArbitraryArgs
	root.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		return Usagef("unknown command %q; see `%s --help`", args[0], c.CommandPath())
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(args)
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return Usagef("%w; see `%s --help`", err, c.CommandPath())
	})
}

// Args converts the error of an argument check to a UsageError.
func Args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, given []string) error {
		if err := check(c, given); err != nil {
			return Usagef("%w; see `%s --help`", err, c.CommandPath())
		}
		return nil
	}
}

// NoneEmpty rejects options with an empty value, such as from an unset variable
// of a script. Otherwise they would act as if they were left out.
func NoneEmpty(c *cobra.Command) error {
	var errs []error
	c.Flags().Visit(func(f *pflag.Flag) {
		empty := f.Value.String() == ""
		if list, ok := f.Value.(pflag.SliceValue); ok {
			empty = len(list.GetSlice()) == 0 || slices.Contains(list.GetSlice(), "")
		}
		if empty {
			errs = append(errs, Usagef("--%s: it is empty: give a value, or leave it out", f.Name))
		}
	})
	return errors.Join(errs...)
}
