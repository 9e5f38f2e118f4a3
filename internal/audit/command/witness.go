package command

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/console"
)

func (v *verbs) witness() *cobra.Command {
	var listen, dir, key string
	var logs []string
	c := &cobra.Command{
		Use: "witness", Short: "Cosign heads of logs that continue those cosigned before", Args: console.Args(cobra.NoArgs),
		Long: `Serve C2SP tlog-witness: cosign a head only if its log continues the head that was
cosigned last. Run it on a machine that the owners of the logs do not control. It keeps
the newest head of each log in --dir, which one process at a time uses; a lost directory
forgets them.`,
		Example: "  ckptstore audit witness --key witness.key --dir /var/lib/witness --log LOGKEY --listen 127.0.0.1:7380",
		RunE: func(c *cobra.Command, _ []string) error {
			if key == "" || dir == "" || len(logs) == 0 {
				return console.Usagef("audit witness: --key, --dir and --log are required")
			}
			w, err := ledger.NewWitness(dir, key, logs)
			if err != nil {
				return err
			}
			return errors.Join(v.listen(c.Context(), listen, w), w.Close())
		},
	}
	f := c.Flags()
	f.StringVar(&listen, "listen", "127.0.0.1:7380", "address")
	f.StringVar(&dir, "dir", "", "directory of the newest heads")
	f.StringVar(&key, "key", "", "`FILE` with the key, made by audit keygen --witness")
	f.StringArrayVar(&logs, "log", nil, "verifier `KEY` of a log; repeatable")
	return c
}
