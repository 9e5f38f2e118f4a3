package main

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// usageError is a mistake in the command line.
type usageError struct{ Err error }

func (u usageError) Error() string { return u.Err.Error() }

func (u usageError) Unwrap() error { return u.Err }

// usagef returns a usageError with a formatted message.
func usagef(format string, values ...any) error {
	return usageError{Err: fmt.Errorf(format, values...)}
}

// program completes the root command of a program: an unknown command or a
// wrong option is a usageError, and the program prints errors itself.
func program(root *cobra.Command, args []string, stdout, stderr io.Writer) {
	root.SilenceUsage, root.SilenceErrors = true, true
	// Without this, an unknown command would not be a usage error.
	root.Args = cobra.ArbitraryArgs
	root.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		return usagef("unknown command %q; see `%s --help`", args[0], c.CommandPath())
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(args)
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%w; see `%s --help`", err, c.CommandPath())
	})
}

// args is cobra's check of the arguments as a usage error.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, given []string) error {
		if err := check(c, given); err != nil {
			return usagef("%w; see `%s --help`", err, c.CommandPath())
		}
		return nil
	}
}

// noneEmpty refuses options that were given without a value, such as by a
// variable that a script has not set: they would be as if they were left out.
func noneEmpty(c *cobra.Command) error {
	var errs []error
	c.Flags().Visit(func(f *pflag.Flag) {
		empty := f.Value.String() == ""
		if list, ok := f.Value.(pflag.SliceValue); ok {
			empty = len(list.GetSlice()) == 0 || slices.Contains(list.GetSlice(), "")
		}
		if empty {
			errs = append(errs, usagef("--%s: it is empty: give a value, or leave it out", f.Name))
		}
	})
	return errors.Join(errs...)
}
