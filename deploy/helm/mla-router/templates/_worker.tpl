{{/* The pod of a worker, without its node's rank: dict "root" . "component" "worker" "arguments" (list) */}}
{{- define "mla.workerPod" }}
{{- $worker := .root.Values.worker }}
{{- $cache := .root.Values.modelCache }}
{{- $serves := eq .component "worker" -}}
metadata:
  labels: {{- include "mla.selector" . | nindent 4 }}
  {{- with $worker.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  securityContext: {{- include "mla.podSecurity" . | nindent 4 }}
  terminationGracePeriodSeconds: {{ add $worker.preStopSeconds 40 }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "mla.scheduling" $worker | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "mla.image" (dict "root" .root "suffix" "") }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- if eq (int $worker.dpAttention) 1 }}
      command: [python, -m, mla_router.launch_worker]
      args:
        - --host=0.0.0.0
        - --port=31000
        - --worker-id=$(POD_NAME)
      {{- else }}
      {{- include "mla.dpAttention" .root | trim | nindent 6 }}
      {{- end }}
        - --device={{ $worker.device }}
        - --tp-size={{ $worker.tpSize }}
        {{- with $worker.modelPath }}
        - {{ printf "--model-path=%s" . | quote }}
        {{- end }}
        {{- range .arguments }}
        - {{ . }}
        {{- end }}
        {{- with include "mla.flags" $worker.flags | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      env:
        - name: POD_NAME
          valueFrom: { fieldRef: { fieldPath: metadata.name } }
        {{- $secret := include "mla.secret" .root }}
        {{- include "mla.fromSecret" (dict "name" "MLA_ROUTER_API_KEY" "secret" $secret "key" "worker-api-key") | nindent 8 }}
        {{- include "mla.fromSecret" (dict "name" "MLA_ROUTER_REPLAY_KEY" "secret" $secret "key" "replay-key") | nindent 8 }}
        {{- if gt (int $worker.nodes) 1 }}
        {{- include "mla.fromSecret" (dict "name" "MLA_ROUTER_DIST_KEY" "secret" $secret "key" "dist-key") | nindent 8 }}
        {{- end }}
        {{- with .root.Values.huggingFace.tokenSecret }}
        {{- include "mla.fromSecret" (dict "name" "HF_TOKEN" "secret" . "key" "token") | nindent 8 }}
        {{- end }}
      {{- if $serves }}
      ports:
        - { name: http, containerPort: 31000 }
      startupProbe:
        httpGet: { path: /health, port: http }
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: {{ mul $worker.startupMinutes 12 }}
      # A frozen worker ends by itself after four times --watchdog-timeout (30 s): this probe is behind it.
      livenessProbe:
        httpGet: { path: /health, port: http }
        periodSeconds: 15
        timeoutSeconds: 5
        failureThreshold: 12
      readinessProbe:
        httpGet: { path: /health, port: http }
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 3
      {{- end }}
      lifecycle:
        preStop:
          exec: { command: [sleep, {{ $worker.preStopSeconds | quote }}] }
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: { drop: [ALL] }
      {{- $gpus := dict }}
      {{- if eq $worker.device "cuda" }}
      {{- $gpus = dict "limits" (dict "nvidia.com/gpu" (int64 .gpus)) }}
      {{- end }}
      resources: {{- toYaml (mergeOverwrite (deepCopy $worker.resources) $gpus) | nindent 8 }}
      volumeMounts:
        - { name: models, mountPath: /models }
        - { name: shm, mountPath: /dev/shm }
  volumes:
    - name: shm
      emptyDir: { medium: Memory, sizeLimit: {{ $worker.sharedMemory }} }
    {{- if eq $cache.kind "shared" }}
    - name: models
      persistentVolumeClaim: { claimName: {{ include "mla.claim" .root }} }
    {{- else if eq $cache.kind "none" }}
    - { name: models, emptyDir: {} }
    {{- end }}
{{- end }}

{{- define "mla.claim" -}}
{{- .Values.modelCache.existingClaim | default (printf "%s-models" (include "mla.name" .)) }}
{{- end }}

{{/* The spec of a claim for models: dict "cache" .Values.modelCache "mode" "ReadWriteOnce" */}}
{{- define "mla.claimSpec" -}}
accessModes: [{{ .mode }}]
{{- with .cache.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests: { storage: {{ .cache.size }} }
{{- end }}
