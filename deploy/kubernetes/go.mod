module github.com/ckptstore/ckptstore/deploy/kubernetes

go 1.26.0
