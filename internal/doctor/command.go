package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session/shm"
)

const help = `Examine this machine before you run jobs on it: GPUs, limits, shared memory, the
filesystem of the store, sockets. Each check reports what it found and the next step.

  trainer doctor
  trainer doctor --store /mnt/checkpoints/store --json

Nothing is changed: probes use their own files, in a directory next to the store
that is removed afterwards, also when the examination is interrupted.

Exit codes: 0 no problems, with or without warnings; 6 problems found; 64 bad
configuration; 128+n signal n.`

// patience is how long a check may take.
const patience = 30 * time.Second

// lockCommand is the hidden command with which the doctor starts itself to try a
// lock from another process. It exits with the code lockHeld if the lock is held.
const (
	lockCommand = "try-lock"
	lockHeld    = 5
)

// Command returns the doctor's command line, for the root of the trainer's.
// inventory looks up the GPUs; store is the default location.
func Command(out io.Writer, store string, inventory func(context.Context) (gpu.Inventory, error)) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Examine this machine: GPUs, limits, shared memory, the store's filesystem",
		Long:  help,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("%w: doctor takes no arguments, got %q; give a store by --store", launch.ErrConfig, args[0])
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			if store == "" {
				return fmt.Errorf("%w: --store is empty; give a directory or a URL", launch.ErrConfig)
			}
			shared, _ := shm.Dir()
			report, err := Examine(c.Context(), Options{
				Store: store, Shared: shared, Inventory: inventory, TryLock: lockElsewhere, Patience: patience,
			})
			if err != nil {
				return err
			}
			if asJSON {
				err = report.JSON(out)
			} else {
				err = report.Table(out, console.Colours(out))
			}
			return errors.Join(err, report.Err())
		},
	}
	c.Flags().StringVar(&store, "store", store, "store: a directory, which need not exist, or a nats:// URL ($CKPTSTORE_STORE)")
	c.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	c.AddCommand(&cobra.Command{
		Use: lockCommand + " FILE", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			err := TakeLock(args[0])
			if errors.Is(err, ErrHeld) {
				os.Exit(lockHeld)
			}
			return err
		},
	})
	return c
}

// lockElsewhere tries a lock in another process of this program.
func lockElsewhere(ctx context.Context, file string) error {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "doctor", lockCommand, file)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == lockHeld {
		return ErrHeld
	}
	if err != nil {
		return fmt.Errorf("try the lock in another process: %w: %s", err, out)
	}
	return nil
}
