// Package launch imports an edge that is not its own.
package launch

import (
	_ "github.com/NVIDIA/go-nvml/pkg/nvml"

	_ "github.com/ckptstore/ckptstore/attic"
	_ "github.com/ckptstore/ckptstore/client"
	_ "github.com/ckptstore/ckptstore/cmd/trainer/digits"
	_ "github.com/ckptstore/ckptstore/events/jetlog"
	_ "github.com/ckptstore/ckptstore/gpu"
)
