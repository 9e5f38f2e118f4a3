package main

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/launch"
)

// hangOptions say when a rank that is silent counts as hung.
type hangOptions struct {
	hangTimeout time.Duration
}

func (o *hangOptions) flags(f *pflag.FlagSet) {
	f.DurationVar(&o.hangTimeout, "hang-timeout", 0, "restart the group when a rank that spoke to the trainer makes no request for this long, after its stacks were taken; 0 for never")
}

func (o hangOptions) check() error {
	if o.hangTimeout < 0 {
		return fmt.Errorf("%w: --hang-timeout %v: give a duration of more than 0, such as 10m, or 0 for never", launch.ErrConfig, o.hangTimeout)
	}
	return nil
}
